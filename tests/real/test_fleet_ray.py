"""Servers that a real local Ray cluster places: two of vLLM on the CPU, one pool. Minutes.

Needs Ray (`pip install 'rookery[ray]'`) in this interpreter.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.real.peers import needs_vllm, served_on_cpu

from rookery.embedded import EngineConfig, open_engine, resolve_model
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.http.capabilities import read_shapes
from rookery.fleet.servers.registry import process_start
from rookery.types import Adapter, LoraFactors, SampleRequest, SamplingParams
from rookery.weights import make_adapter

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
PROMPTS = [tuple(range(100 + i, 120 + i)) for i in range(8)]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def _adapter() -> Adapter:
    generator = torch.Generator().manual_seed(1)
    factors = {
        layer: LoraFactors(
            a=torch.randn(4, size_in, generator=generator) * size_in**-0.5,
            b=torch.randn(size_out, 4, generator=generator) * 0.1,
            scale=1.5,
        )
        for layer, (size_in, size_out) in read_shapes(resolve_model("smollm2").path).items()
        if layer.endswith(("q_proj", "v_proj"))
    }
    return make_adapter("placed", base="smollm2", factors=factors)


def _children() -> dict[int, str]:
    """Every vLLM server of this machine: process id and command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "vllm.entrypoints.openai.api_server" in line and "_rookery_test_ray" in line:
            found[int(entry.parent.name)] = line
    return found


async def test_placed_servers_say_what_the_embedded_engine_says_and_come_back(
    tmp_path: Path,
) -> None:
    config = FleetConfig(
        name="smollm2",
        adapter_folder=tmp_path / "adapters",
        launch=LaunchConfig(
            **served_on_cpu(
                placement="ray",
                ray_address="local",
                replicas=2,
                max_model_len=512,
                max_loras=2,
                args=("--served-model-name", "_rookery_test_ray"),
            )
        ),
    )
    async with open_engine(EngineConfig(model="smollm2", dtype="float32")) as engine:
        refs = [engine.base, await engine.load(_adapter())]
        wanted = [SampleRequest(model=r, prompt=p, params=GREEDY) for r in refs for p in PROMPTS]
        expected = await engine.sample(wanted)
    async with open_fleet(config) as fleet:
        assert [replica.route for replica in fleet.pool.replicas] == ["http", "http"]
        assert await fleet.load(_adapter()) == refs[1]
        answers = await fleet.sample(wanted)
        assert [c.tokens for [c] in answers] == [c.tokens for [c] in expected]
        servers = _children()
        assert len(servers) == 2
        os.kill(min(servers), signal.SIGKILL)
        again = await fleet.sample(wanted)
        assert [c.tokens for [c] in again] == [c.tokens for [c] in expected]
    assert not any(process_start(pid) for pid in _children())
