"""Servers that a real Ray cluster cannot place or start. Half a minute."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
from fleet.test_ray_placement import FAKE
from marks import long

from rookery.errors import FleetError
from rookery.fleet.servers.ray_placement import place_on_ray
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
