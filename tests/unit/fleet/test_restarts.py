"""Servers that die: started again, given up, their engine processes ended."""

import asyncio
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fleet.stub import until

from rookery.config import parse_config
from rookery.errors import ConfigError, FleetError
from rookery.fleet.admin import up
from rookery.fleet.servers import launch as launching
from rookery.fleet.servers.launch import LocalServer, keep_alive, open_servers
from rookery.fleet.servers.ray_placement import place_on_ray
from rookery.fleet.servers.registry import find_registries, process_start
from rookery.fleet.servers.settings import LaunchConfig, command_line, environment
from rookery.runtime.guard import group_members
from rookery.runtime.retry import Backoff

FAKE = Path(__file__).parent / "fake"
CONFIG = LaunchConfig(model="tiny", device="cpu", port=18550)
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM_FAILURES", str(tmp_path))
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    monkeypatch.setattr(launching, "RESTARTS", Backoff(first_s=0.1, longest_s=60.0))
    return tmp_path / "fleet"


def fail_next(server: LocalServer, tmp_path: Path, *, times: int) -> None:
    """The next starts of a server fail."""
    (tmp_path / server.url.rpartition(":")[2]).write_text(str(times))


async def kill(server: LocalServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.wait_ended()


async def test_a_killed_server_is_started_again_on_its_port_a_few_times() -> None:
    async with open_servers(CONFIG.model_copy(update={"restarts": 1})) as [server]:
        first, url = server.pid, server.url
        await kill(server)
        await server.restart()
        assert server.is_alive and server.pid != first and server.url == url
        await kill(server)
        with pytest.raises(FleetError, match=r"Given up after 1 restarts.*status SIGKILL"):
            await server.restart()


async def test_restarts_that_fail_are_counted_and_spaced(tmp_path: Path) -> None:
    async with open_servers(CONFIG) as [server]:
        fail_next(server, tmp_path, times=2)
        await kill(server)
        began_s = time.monotonic()
        await server.restart()
        assert server.is_alive and server.num_restarts == 3
        assert time.monotonic() - began_s > 0.1 + 0.2


async def test_a_server_that_is_given_up_leaves_the_others_up(tmp_path: Path, state: Path) -> None:
    pair: list[LocalServer] = []
    is_ready = asyncio.Event()

    def ready(servers: Sequence[LocalServer]) -> None:
        pair.extend(servers)
        is_ready.set()

    config = CONFIG.model_copy(update={"replicas": 2, "restarts": 1})
    serving = asyncio.create_task(up(config, on_ready=ready))
    await is_ready.wait()
    bad, good = pair
    for server in pair:
        fail_next(server, tmp_path, times=9)
    await kill(bad)
    await until(lambda: "OutOfMemoryError" in bad.log.read_text(), LIMIT_S)
    await bad.wait_ended()
    assert good.is_alive and not serving.done()
    await kill(good)
    with pytest.raises(FleetError, match=r"(?s)No server is left\..*Given up.*Given up"):
        await serving
    assert find_registries(state) == []


async def test_being_told_to_terminate_ends_a_start(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    began = asyncio.Event()
    serving = asyncio.create_task(
        up(CONFIG, on_ready=lambda _: None, progress=lambda _: began.set())
    )
    await began.wait()
    [registry] = find_registries(state)
    [record] = registry.records
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert process_start(record.pid) == "" and find_registries(state) == []


async def test_what_a_dead_server_leaves_running_is_ended_without_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "child")
    async with open_servers(CONFIG) as [server]:
        [child] = set(group_members(server.pid)) - {server.pid}
        await kill(server)
        await until(lambda: process_start(child) == "", LIMIT_S)


async def test_another_program_on_the_port_is_not_taken_for_the_server() -> None:
    async with open_servers(CONFIG.model_copy(update={"restarts": 1})) as [server]:
        await kill(server)
        stranger = await asyncio.start_server(
            lambda *_: None, "127.0.0.1", int(server.url.rpartition(":")[2])
        )
        try:
            with pytest.raises(FleetError, match="Another program listens on port"):
                await server.restart()
        finally:
            stranger.close()
            await stranger.wait_closed()


async def test_nothing_is_left_of_a_start_that_cannot_begin(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, *, first: int) -> None:
        raise FleetError("No port is free.")

    monkeypatch.setattr(launching, "reserve_port", refuse)
    with pytest.raises(FleetError, match="No port is free"):
        async with open_servers(CONFIG):
            pass
    assert find_registries(state) == []


async def test_a_server_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    restart, has_restarted = LocalServer.restart, asyncio.Event()

    async def noted(server: LocalServer, why: str = "") -> None:
        await restart(server, why)
        has_restarted.set()

    def hang_after(limit_s: float) -> None:
        monkeypatch.setattr(launching, "HANG_S", limit_s)

    monkeypatch.setattr(LocalServer, "restart", noted)
    monkeypatch.setattr(launching, "HEALTH_S", 0.05)
    monkeypatch.setattr(launching, "HEALTH_LIMIT_S", 0.5)
    monkeypatch.setattr(launching, "STOP_S", 0.3)
    hang_after(600.0)  # a server that answers late, since the machine is busy, does not hang
    async with open_servers(CONFIG.model_copy(update={"restarts": 1})) as [server]:
        keeping = asyncio.create_task(keep_alive(server))
        first = server.pid
        stop_group(first)
        hang_after(0.0)
        await until(lambda: server.pid != first, LIMIT_S)
        hang_after(600.0)
        async with asyncio.timeout(LIMIT_S):
            await has_restarted.wait()
        assert server.num_restarts == 1 and not keeping.done()
        stop_group(server.pid)
        hang_after(0.0)
        async with asyncio.timeout(LIMIT_S):
            given_up = r"Given up after 1 restarts.*was not healthy for"
            assert re.search(given_up, str(await keeping))


def stop_group(pid: int) -> None:
    """Its processes live and answer nothing."""
    os.killpg(pid, signal.SIGSTOP)


# Placing servers on a Ray cluster, without one.


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
    with pytest.raises(ConfigError, match=r"pip install .*\[ray\]"):
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
