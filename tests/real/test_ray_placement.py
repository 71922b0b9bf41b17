"""Servers on a real Ray cluster: started again, or told why not. Half a minute."""

import asyncio
import importlib.util
import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from fleet.test_restarts import FAKE
from marks import long

from rookery.errors import FleetError
from rookery.fleet.servers.ray_placement import place_on_ray
from rookery.fleet.servers.registry import process_start
from rookery.fleet.servers.settings import LaunchConfig

pytestmark = [
    long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


async def test_a_real_cluster_without_room_is_given_up() -> None:
    config = LaunchConfig(
        model="m", device="cuda", tensor_parallel=4, placement="ray", replicas=2, placement_s=3
    )
    began_s = time.monotonic()
    with pytest.raises(
        FleetError, match=r"2 servers of 1 CPU and 4 GPU each.*1 nodes with .* 0 GPU"
    ):
        async with place_on_ray(config, num=2, address="local"):
            pass
    assert time.monotonic() - began_s < 60


async def test_a_server_that_cannot_start_there_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_VLLM", "memory")
    config = LaunchConfig(model="tiny", device="cpu", port=18800, placement="ray", replicas=1)
    with pytest.raises(FleetError, match="Tried to allocate") as failed:
        async with place_on_ray(config, num=1, address="local"):
            pass
    assert "Traceback" not in str(failed.value)


def _pid(url: str) -> int:
    """The process of a server; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(url + "/health") as answer:
            return int(json.load(answer)["pid"])
    except OSError:
        return 0


async def test_servers_are_placed_started_again_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAILURES", str(tmp_path))
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{os.environ.get('PYTHONPATH', '')}")
    config = LaunchConfig(model="tiny", device="cpu", port=18800, placement="ray", replicas=2)
    async with place_on_ray(config, num=2, address="local") as placed:
        told = []
        for url in placed.urls:
            with urllib.request.urlopen(url + "/health") as answer:  # noqa: ASYNC210
                told.append(json.load(answer))
        assert len(set(placed.urls)) == 2 and len(placed.api_key) > 20
        assert all(process_start(t["pid"]) for t in told)
        assert {t["env"]["VLLM_API_KEY"] for t in told} == {placed.api_key}
        # Its next start fails, the one after that does not.
        (tmp_path / placed.urls[0].rpartition(":")[2]).write_text("1")
        os.kill(told[0]["pid"], signal.SIGKILL)
        async with asyncio.timeout(60):
            while (  # noqa: ASYNC110  other processes tell no event
                again := await asyncio.to_thread(_pid, placed.urls[0])
            ) in (0, told[0]["pid"]):
                await asyncio.sleep(0.1)
        told.append({"pid": again})
    assert not any(process_start(t["pid"]) for t in told)
