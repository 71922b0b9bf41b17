"""The fleet on real vLLM on a GPU, with vLLM's CUDA graphs and with whole ones. Eight minutes.

ROOKERY_VLLM_PYTHON=python3 ROOKERY_GPU_MODEL=/path/to/model pytest tests/gpu/test_fleet.py
"""

import asyncio
import os
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import pytest
import pytest_asyncio
import torch

from rookery.embedded import EngineConfig, open_engine
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.admin import verify
from rookery.fleet.http.capabilities import read_shapes
from rookery.types import (
    Adapter,
    LoraFactors,
    ModelRef,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from rookery.weights import make_adapter

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
MODEL = os.environ.get("ROOKERY_GPU_MODEL", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.skipif(not MODEL, reason="ROOKERY_GPU_MODEL names no model folder"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1500),
]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT = tuple(range(100, 140))
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def make(name: str, seed: int, *, device: str = "cpu", rank: int = 16) -> Adapter:
    from pathlib import Path

    generator = torch.Generator().manual_seed(seed)
    factors = {
        layer: LoraFactors(
            a=(torch.randn(rank, size_in, generator=generator) * size_in**-0.5).to(device),
            b=(torch.randn(size_out, rank, generator=generator) * 0.05).to(device),
            scale=2.0,
        )
        for layer, (size_in, size_out) in read_shapes(Path(MODEL)).items()
        if layer.endswith(TARGETS)
    }
    return make_adapter(name, base="", factors=factors)


def launch_config(graphs: Literal["auto", "full"]) -> LaunchConfig:
    return LaunchConfig(
        model=MODEL,
        python=PYTHON,
        replicas=1,
        dtype="bfloat16",
        max_model_len=2048,
        max_loras=8,
        max_cpu_loras=64,
        gpu_memory_utilization=0.4,
        cuda_graphs=graphs,
        env={"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "full"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with open_fleet(FleetConfig(launch=launch_config(request.param))) as fleet:
        yield fleet


async def test_the_extension_http_and_cuda_ipc_give_equal_outputs(fleet: Fleet) -> None:
    [own] = fleet.pool.replicas
    assert own.route == "extension"
    assert (await own.client.call_workers("rookery_report"))[0]["token_index"]
    plain = FleetConfig(urls=(own.url,), max_loras=8, max_lora_rank=16)
    texts = set()
    for seed in range(3):
        found = []
        adapter = make(f"extension{seed}", seed)
        ref = await fleet.load(adapter)
        found.append(
            (await fleet.sample([SampleRequest(model=ref, prompt=PROMPT, params=GREEDY)]))[0]
        )
        async with open_fleet(plain) as http:
            assert http.pool.replicas[0].route == "http"
            ref = await http.load(make(f"http{seed}", seed))
            found.append(
                (await http.sample([SampleRequest(model=ref, prompt=PROMPT, params=GREEDY)]))[0]
            )
        own.staging.in_place = True
        try:
            ref = await fleet.load(make(f"cuda{seed}", seed, device="cuda"))
            found.append(
                (await fleet.sample([SampleRequest(model=ref, prompt=PROMPT, params=GREEDY)]))[0]
            )
        finally:
            own.staging.in_place = False
        assert len({answer[0].tokens for answer in found}) == 1
        for answer in found[1:]:
            # vLLM adds up parts of a LoRA product in whatever order they arrive, in bfloat16.
            assert answer[0].logprobs == pytest.approx(found[0][0].logprobs, abs=0.1)
        texts.add(found[0][0].tokens)
    assert len(texts) == 3, "the adapters make a difference"


async def test_answers_are_those_of_the_embedded_engine(fleet: Fleet) -> None:
    """Prompts of many lengths in one batch, of the base model and of adapters."""
    adapters = [make(f"same{seed}", 200 + seed) for seed in range(2)]
    refs = [fleet.base, *[await fleet.load(adapter) for adapter in adapters]]
    prompts = [tuple(range(100 + i, 101 + 7 * i + i)) for i in range(1, 7)]
    wanted = [
        SampleRequest(model=ref, prompt=prompt, params=GREEDY) for prompt in prompts for ref in refs
    ]
    answers = [answer for [answer] in await fleet.sample(wanted)]
    async with open_engine(EngineConfig(model=MODEL, dtype="float32")) as engine:
        own = [engine.base, *[await engine.load(adapter) for adapter in adapters]]

        async def differences(models: Sequence[ModelRef]) -> list[float]:
            """Mean difference of the answers' log-probabilities from those under these models, in
            nats, by the model that gave the answers."""
            scores = await engine.score(
                [
                    ScoreRequest(
                        model=models[refs.index(request.model)],
                        tokens=(*request.prompt, *answer.tokens),
                        start=len(request.prompt),
                    )
                    for request, answer in zip(wanted, answers, strict=True)
                ]
            )
            found: dict[ModelRef, list[float]] = {ref: [] for ref in refs}
            for request, score, answer in zip(wanted, scores, answers, strict=True):
                pairs = zip(score.logprobs, answer.logprobs, strict=True)
                found[request.model] += [abs(one - other) for one, other in pairs]
            return [statistics.fmean(values) for values in found.values()]

        # bfloat16 on one side, float32 on the other.
        assert max(await differences(own)) < 0.1
        assert min(await differences([own[1], own[2], own[0]])) > 0.2, "another model differs"


async def test_prompts_are_computed_as_answers_are(fleet: Fleet) -> None:
    checks = {check.name: check for check in await verify(fleet.pool.replicas[0].url)}
    assert checks["prompt log-probs"].is_fine, checks["prompt log-probs"]


async def test_32_adapters_on_8_slots(fleet: Fleet) -> None:
    refs = [await fleet.load(make(f"p{i}", 100 + i)) for i in range(32)]
    wanted = [
        SampleRequest(model=ref, prompt=(*PROMPT, i), params=GREEDY)
        for i in range(4)
        for ref in refs
    ]
    together = await fleet.sample(wanted)
    counts = Counter(answer[0].tokens for answer in together)
    assert len(counts) > 32, "the adapters make a difference"
    load = fleet.pool.replicas[0].load
    assert set(refs) <= set(load.resident)
    for request, answer in list(zip(wanted, together, strict=True))[::16]:
        [alone] = await fleet.sample([request])
        # bfloat16 sums depend on the batch: the first token is compared, and closely.
        assert alone[0].tokens[0] == answer[0].tokens[0]
        assert alone[0].logprobs[0] == pytest.approx(answer[0].logprobs[0], abs=0.25)


async def test_a_killed_server_comes_back_and_nothing_is_lost(fleet: Fleet) -> None:
    [replica] = fleet.pool.replicas
    assert replica.local is not None
    if replica.local.config.cuda_graphs == "full":
        pytest.skip("a second start: the graphs make no difference to it")
    wanted = [
        SampleRequest(
            model=fleet.base,
            prompt=(*PROMPT, i % 50),
            params=SamplingParams(max_tokens=64, seed=i, ignore_eos=True),
        )
        for i in range(400)
    ]

    async def kill() -> None:
        while replica.load.num_sequences < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert replica.local is not None
        os.kill(replica.local.pid, signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(fleet.sample(wanted))
        group.create_task(kill())
    assert all(len(answer[0].tokens) == 64 for answer in call.result())
    assert replica.local.num_restarts == 1 and fleet.pool.num_resent > 0
