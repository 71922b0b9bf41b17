"""A vLLM server that is not ours, on the CPU: clients come, go, are killed; it lives on."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tests.real.peers import engine_of, needs_vllm, served_on_cpu

from rookery.errors import FleetError
from rookery.fleet import Client, FleetConfig, LaunchConfig, open_fleet, open_session
from rookery.fleet.servers.launch import LocalServer, open_servers
from rookery.types import LoraFactors, SampleRequest, SamplingParams
from rookery.weights import make_adapter, read_adapter, write_adapter

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
CLIENT = """
import asyncio, sys
from rookery.fleet import FleetConfig, open_fleet
from rookery.types import SampleRequest, SamplingParams
from rookery.weights import read_adapter

async def main(url, folder, is_killed):
    async with open_fleet(FleetConfig(name="smollm2", urls=(url,), max_loras=2)) as fleet:
        ref = await fleet.load(read_adapter(folder))
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        [[answer]] = await fleet.sample([SampleRequest(model=ref, prompt=(1, 2, 3), params=params)])
        print(*answer.tokens, flush=True)
        if is_killed:
            long = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
            await fleet.sample([SampleRequest(model=ref, prompt=(1, 2), params=long)] * 4)

asyncio.run(main(*sys.argv[1:3], len(sys.argv) > 3))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LocalServer]:
    """Without anything of Rookery inside."""
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_loras": 2, "max_cpu_loras": 2}
    async with open_servers(LaunchConfig(**served_on_cpu(extension=False, **sizes))) as [server]:
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    layer = "model.layers.3.mlp.down_proj"
    found = {}
    for seed, name in enumerate("abc"):
        generator = torch.Generator().manual_seed(seed)
        factors = LoraFactors(
            a=torch.randn(4, 1536, generator=generator) * 0.5,
            b=torch.randn(576, 4, generator=generator) * 2,
            scale=1.0,
        )
        adapter = make_adapter(name, base="smollm2", factors={layer: factors})
        found[name] = write_adapter(adapter, root / name)
    return found


async def _listed(url: str) -> list[str]:
    async with open_session() as session:
        models = await Client(url, session=session).get("/v1/models")
    return [model["id"] for model in models["data"] if model["parent"]]


async def _run(url: str, folder: Path, *, is_killed: bool) -> bytes:
    """What one client script says; one that is to be killed has requests in flight then."""
    words = [sys.executable, "-c", CLIENT, url, str(folder), *(["killed"] if is_killed else [])]
    client = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert client.stdout is not None
    said = await client.stdout.readline()
    if is_killed:
        client.send_signal(signal.SIGKILL)
    assert await client.wait() == (-signal.SIGKILL if is_killed else 0)
    return said


@pytest.mark.parametrize("is_killed", [False, True])
async def test_four_clients_in_turn_leave_a_server_of_two_slots_as_it_was(
    server: LocalServer, folders: dict[str, Path], is_killed: bool
) -> None:
    said: dict[str, bytes] = {}
    for name in ("a", "b", "c", "a"):
        answer = await _run(server.url, folders[name], is_killed=is_killed)
        assert len(answer.split()) == 4 and said.setdefault(name, answer) == answer
        assert len(await _listed(server.url)) == (1 if is_killed else 0)
        assert server.is_alive
    assert len(set(said.values())) == 3, "the adapters make a difference"
    async with open_fleet(FleetConfig(name="smollm2", urls=(server.url,), max_loras=2)):
        assert await _listed(server.url) == []


async def test_after_its_engine_was_killed_clients_are_told_and_leave_nothing(
    server: LocalServer, folders: dict[str, Path]
) -> None:
    config = FleetConfig(name="smollm2", urls=(server.url,), max_loras=2, all_down_timeout_s=3)
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    async with asyncio.timeout(120):
        async with open_fleet(config) as fleet:
            ref = await fleet.load(read_adapter(folders["a"]))
            request = SampleRequest(model=ref, prompt=(1, 2, 3), params=params)
            call = asyncio.create_task(fleet.sample([request] * 4))
            while not fleet.pool.replicas[0].load.resident:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            os.kill(engine_of(server.pid), signal.SIGKILL)
            with pytest.raises(FleetError):
                await call
            staged = fleet.staging.root
        while server.is_alive:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    # Where the server had still listened, the next fleet clears up.
    await server.restart()
    async with open_fleet(config) as fleet:
        assert staged.name not in os.listdir(staged.parent)
        ref = await fleet.load(read_adapter(folders["b"]))
        short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        [[answer]] = await fleet.sample([SampleRequest(model=ref, prompt=(1, 2), params=short)])
        assert len(answer.tokens) == 2
    assert await _listed(server.url) == []
