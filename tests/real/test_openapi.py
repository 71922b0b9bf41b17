"""Generated requests to every route that the service documents: no answer is a 500."""

import os
from pathlib import Path

import pytest
from service.server_process import ServerProcess
from tests.real.peers import printed_by
from tiny import write_tiny_model

COMMAND = os.environ.get("ROOKERY_SCHEMATHESIS", "")
RUN_S = 1200.0

pytestmark = [
    pytest.mark.skipif(not COMMAND, reason="ROOKERY_SCHEMATHESIS names no schemathesis command"),
    pytest.mark.timeout(1500),
]


async def test_no_generated_request_is_answered_with_500(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    server = ServerProcess(tmp_path, {"tiny/model": str(folder)})
    words = (
        COMMAND, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error",
        "--max-examples", "20", "--phases", "coverage,fuzzing", "--request-timeout", "60",
        # A poll of a session that has nothing waits as long as it may.
        "--exclude-path-regex", "retrieve_futures",
    )  # fmt: skip
    async with server.running():
        await printed_by(*words, env={}, limit_s=RUN_S, folder=tmp_path)
