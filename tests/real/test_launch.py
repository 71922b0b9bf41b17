"""Starting real vLLM servers on the CPU: errors, keys, deaths, and that nothing is left."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.real.peers import engine_of, needs_vllm, served_on_cpu

from rookery.embedded import resolve_model
from rookery.errors import FleetError
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet, open_servers
from rookery.fleet.http.capabilities import read_shapes
from rookery.fleet.servers.registry import find_registries, process_start
from rookery.runtime.guard import group_members
from rookery.types import Adapter, LoraFactors, SampleRequest, SamplingParams
from rookery.weights import make_adapter

pytestmark = [needs_vllm, pytest.mark.timeout(900)]
OWNER = """
import asyncio, sys
from rookery.fleet import LaunchConfig, open_servers
async def main():
    async with open_servers(LaunchConfig.model_validate_json(sys.argv[1])):
        await asyncio.Event().wait()
asyncio.run(main())
"""


def _launch(**changes: Any) -> LaunchConfig:
    return LaunchConfig(**{**served_on_cpu(max_model_len=512, max_loras=2), **changes})


def _adapter() -> Adapter:
    layer, (size_in, size_out) = next(iter(read_shapes(resolve_model("smollm2").path).items()))
    factors = LoraFactors(a=torch.ones(4, size_in), b=torch.zeros(size_out, 4), scale=1.0)
    return make_adapter("plain", base="smollm2", factors={layer: factors})


def _shared_memory(pids: list[int]) -> set[Path]:
    """The shared memory of vLLM that these processes use."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(name) for name in re.findall(r"/dev/shm/psm_\w+", maps)}


async def _until(is_so: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110  other processes tell no event
            await asyncio.sleep(0.1)


async def test_the_first_error_of_the_engine_is_shown() -> None:
    with pytest.raises(FleetError) as failed:
        async with open_servers(_launch(args=("--num-gpu-blocks-override", "2"))):
            pass
    said = str(failed.value)
    assert "ValueError: To serve at least one request" in said and "root cause above" not in said
    assert "lower launch.max_model_len" in said


async def test_a_killed_server_comes_back_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a key that was exported for other servers")
    async with open_fleet(FleetConfig(launch=_launch())) as fleet:
        [replica] = fleet.pool.replicas
        assert replica.local is not None
        ref = await fleet.load(_adapter())
        params = SamplingParams(max_tokens=4, temperature=0)
        wanted = [
            SampleRequest(model=m, prompt=(1, 2, 3), params=params) for m in (fleet.base, ref)
        ]
        first = await fleet.sample(wanted)
        engine = group_members(replica.local.pid)
        shared = _shared_memory(engine)
        assert len(engine) > 1 and shared
        os.kill(replica.local.pid, signal.SIGKILL)
        await replica.local.wait_ended()
        replica.attention.set()
        await _until(lambda: replica.local is not None and replica.local.num_restarts == 1, 60)
        await _until(lambda: replica.load.is_open, 300)
        assert await fleet.sample(wanted) == first
        assert not any(process_start(pid) for pid in engine)
        assert not any(memory.exists() for memory in shared)
        last = replica.local.pid
        shared = _shared_memory(group_members(last))
    assert group_members(last) == [] and not any(memory.exists() for memory in shared)


async def test_nothing_is_left_of_a_start_whose_owner_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, _launch().model_dump_json()
    )
    try:
        await _until(lambda: any(led.records for led in find_registries(tmp_path / "fleet")), 60)
        [registry] = find_registries(tmp_path / "fleet")
        server = registry.records[0].pid
        # The API process, Python's resource tracker, the engine.
        await _until(lambda: len(group_members(server)) >= 3, 300)
    finally:
        owner.kill()
        await owner.wait()
    await _until(lambda: group_members(server) == [], 30)


async def test_requests_of_one_server_outlive_its_engine() -> None:
    launch = _launch(max_model_len=1024, max_loras=0)
    async with open_fleet(FleetConfig(launch=launch, all_down_timeout_s=600)) as fleet:
        [replica] = fleet.pool.replicas
        assert replica.local is not None
        wanted = [
            SampleRequest(
                model=fleet.base,
                prompt=(1, 2, 3 + i),
                params=SamplingParams(max_tokens=64, seed=i, ignore_eos=True),
            )
            for i in range(32)
        ]
        caller = asyncio.create_task(fleet.sample(wanted))
        await _until(lambda: replica.load.num_sequences >= len(wanted), 60)
        os.kill(engine_of(replica.local.pid), signal.SIGKILL)
        answers = await caller
        assert all(len(completion.tokens) == 64 for [completion] in answers)
        assert fleet.pool.num_resent > 0 and replica.local.num_restarts == 1
