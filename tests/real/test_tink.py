"""The tinker SDK, as it is, against the service in a process of its own, which is killed."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from service.server_process import ServerProcess
from tiny import write_tiny_model

CLIENT = Path(__file__).with_name("tinker_client.py")
PYTHON = os.environ.get("ROOKERY_TINKER_PYTHON", "")
RUN_S = 280.0

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="ROOKERY_TINKER_PYTHON names no Python with tinker 0.36"
)


async def drive(server: ServerProcess, *, steps: int, kill_after: tuple[int, ...] = ()) -> Any:
    """What the client saw; the server is killed when it has told of these steps."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
    }
    client = await asyncio.create_subprocess_exec(
        PYTHON, str(CLIENT), "tiny/model", str(steps),
        env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    last: dict[str, Any] = {}
    async with asyncio.timeout(RUN_S):
        while line := await client.stdout.readline():
            last = json.loads(line)
            if last.get("step") in kill_after:
                await server.kill()
                await server.start()
        assert await client.wait() == 0
    return last


@pytest.mark.timeout(900)
async def test_the_sdk_trains_and_does_not_notice_kills(tmp_path: Path) -> None:
    tiny_folder = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    server = ServerProcess(tmp_path / "a", {"tiny/model": str(tiny_folder)})
    await server.start()
    plain = await drive(server, steps=12)
    assert await server.stop() == 143
    assert plain["names"] == ["tiny/model"]
    assert plain["losses"][-1] < plain["losses"][0]
    assert plain["policy"]["importance_sampling"] == pytest.approx(-9.0, abs=1e-3)
    assert plain["policy"]["gspo"] == pytest.approx(-9.0, abs=1e-2)
    assert plain["policy"]["dro"] > 9.0, "a sum of -log p, and hardly any term that holds it"
    assert plain["custom"]["own"] == pytest.approx(plain["custom"]["plain"], rel=1e-5)
    assert plain["custom"]["reported"] == plain["custom"]["own"]
    assert plain["resumed"] == plain["saved"]
    assert "There are: cross_entropy" in plain["refusal"]

    server = ServerProcess(tmp_path / "b", {"tiny/model": str(tiny_folder)})
    await server.start()
    killed = await drive(server, steps=12, kill_after=(2, 5, 9))
    await server.stop()
    assert killed["hash"] == plain["hash"]
    assert killed["saved"] == plain["saved"]
