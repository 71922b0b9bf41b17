"""Placing servers on a Ray cluster, without one."""

import asyncio
import importlib.util
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rookery.config import parse_config
from rookery.errors import ConfigError, FleetError
from rookery.fleet.servers.ray_placement import place_on_ray
from rookery.fleet.servers.settings import LaunchConfig, command_line, environment

FAKE = Path(__file__).parent / "fake"
HAS_RAY = importlib.util.find_spec("ray") is not None


def test_servers_beyond_this_machine_need_a_key_and_lose_the_open_routes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 only"):
        parse_config(LaunchConfig, {"model": "m", "host": "10.0.0.5"}, origin="x")
    config = LaunchConfig(model="m", device="cpu", host="10.0.0.5", api_key="secret")
    env = environment(config, index=0, num_servers=1, modules=tmp_path, adapters=None)
    assert env["VLLM_API_KEY"] == "secret" and env["VLLM_SERVER_DEV_MODE"] == "0"
    line = command_line(config, port=1)
    assert "--worker-extension-cls" not in line and "secret" not in " ".join(line)
    assert "secret" not in config.model_dump_json() and "secret" not in repr(config)
    with pytest.raises(ConfigError, match="needs replicas"):
        parse_config(LaunchConfig, {"model": "m", "placement": "ray"}, origin="x")


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
async def test_without_ray_the_install_line_is_given() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rookery\[ray\]'"):
        async with place_on_ray(LaunchConfig(model="m"), num=1, address="auto"):
            pass


class FullCluster:
    """Stands in for Ray: a cluster of two nodes that never has room. Counts what is given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        ray = self._module(
            "ray",
            is_initialized=lambda: False,
            init=lambda *_, **__: None,
            shutdown=lambda: self.calls.append("shutdown"),
            cluster_resources=lambda: {"CPU": 12.0, "GPU": 8.0},
            available_resources=lambda: {"CPU": 10.0, "GPU": 3.0},
            nodes=lambda: [
                {"Alive": True, "Resources": {"CPU": 4.0}},
                {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 8.0}},
                {"Alive": False, "Resources": {"GPU": 16.0}},
            ],
            exceptions=self._module("ray.exceptions", RayTaskError=RuntimeError),
        )
        util = self._module(
            "ray.util",
            placement_group=lambda _: self,
            remove_placement_group=lambda _: self.calls.append("removed"),
        )
        strategies = self._module(
            "ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=object
        )
        for module in (ray, util, strategies):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def ready(self) -> "FullCluster":
        return self

    def future(self) -> Future[None]:
        return Future()

    @staticmethod
    def _module(name: str, **content: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(content)
        return module


async def test_a_cluster_without_room_is_given_up_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FullCluster(monkeypatch)
    config = LaunchConfig(model="m", device="cuda", tensor_parallel=2, placement_s=0.1, replicas=4)
    with pytest.raises(FleetError) as failed:
        async with asyncio.timeout(60), place_on_ray(config, num=4, address="auto"):
            pass
    said = str(failed.value)
    assert "at auto did not make room for 4 servers of 1 CPU and 2 GPU each" in said
    assert "2 nodes with 12 CPU (10 free, 8 on its largest node)" in said
    assert "8 GPU (3 free, 8 on its largest node)" in said and "Lower launch.replicas" in said
    assert cluster.calls == ["removed", "shutdown"]
