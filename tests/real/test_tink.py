"""The tinker SDK, as it is, against the service in a process of its own, which is killed."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from service.server_process import ServerProcess
from tests.real.peers import TINKER, printed_by
from tiny import write_tiny_model

CLIENT = Path(__file__).with_name("tinker_client.py")
RUN_S = 280.0

TEMPERATURE_CLIENT = Path(__file__).with_name("temperature_client.py")
OLD_CLIENT = Path(__file__).with_name("tinker_old_client.py")
needs_tinker = pytest.mark.skipif(
    not TINKER, reason="ROOKERY_TINKER_PYTHON names no Python with tinker 0.36"
)
OLD_PYTHONS = os.environ.get("ROOKERY_TINKER_OLD_PYTHONS", "").split()


def environment_of(server: ServerProcess) -> dict[str, str]:
    return {
        "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"
    }  # fmt: skip


async def drive(server: ServerProcess, *, steps: int, kill_after: tuple[int, ...] = ()) -> Any:
    """What the client saw; the server is killed when it has told of these steps."""
    client = await asyncio.create_subprocess_exec(
        TINKER, str(CLIENT), "tiny/model", str(steps),
        env=os.environ | environment_of(server), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    last: dict[str, Any] = {}
    try:
        async with asyncio.timeout(RUN_S):
            while line := await client.stdout.readline():
                last = json.loads(line)
                if last.get("step") in kill_after:
                    await server.kill()
                    await server.start()
            assert await client.wait() == 0
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    return last


@needs_tinker
@pytest.mark.timeout(900)
async def test_the_sdk_trains_and_does_not_notice_kills(tmp_path: Path) -> None:
    tiny_folder = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain_server = ServerProcess(tmp_path / "a", {"tiny/model": str(tiny_folder)})
    async with plain_server.running():
        plain = await drive(plain_server, steps=12)
        assert await plain_server.stop() == 143
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
    async with server.running():
        killed = await drive(server, steps=12, kill_after=(2, 5, 9))
    assert killed["hash"] == plain["hash"]
    assert killed["saved"] == plain["saved"]


@needs_tinker
@pytest.mark.timeout(600)
async def test_logprobs_are_those_of_the_temperature(tmp_path: Path) -> None:
    tiny_folder = write_tiny_model(tmp_path / "tiny")
    server = ServerProcess(tmp_path, {"tiny/model": str(tiny_folder)})
    async with server.running():
        words = (TINKER, str(TEMPERATURE_CLIENT), "tiny/model")
        output = await printed_by(*words, env=environment_of(server), limit_s=RUN_S)
    seen = json.loads(output.splitlines()[-1])
    for num_pairs, gap in seen["temperatures"]:
        assert num_pairs > 20
        assert gap < 1e-4
    assert seen["drawn"] == pytest.approx(seen["scored"], abs=1e-4)


@pytest.mark.skipif(not OLD_PYTHONS, reason="ROOKERY_TINKER_OLD_PYTHONS names no old SDKs")
@pytest.mark.timeout(600)
async def test_sdks_of_the_json_time_train_and_sample(tmp_path: Path) -> None:
    tiny_folder = write_tiny_model(tmp_path / "tiny")
    server = ServerProcess(tmp_path, {"tiny/model": str(tiny_folder)})
    async with server.running():
        for python in OLD_PYTHONS:
            words = (python, str(OLD_CLIENT), "tiny/model")
            output = await printed_by(*words, env=environment_of(server), limit_s=RUN_S)
            seen = json.loads(output.splitlines()[-1])
            assert seen["losses"] == sorted(seen["losses"], reverse=True)
            assert seen["again"] == seen["forward"], "resumed from what was saved"
            assert seen["scores"] == pytest.approx(seen["forward"], abs=1e-4)
            assert min(seen["num_drawn"]) >= 1
