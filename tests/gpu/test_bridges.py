"""Weights in training published to a real vLLM on the same GPU: one copy, proved. Six minutes.

ROOKERY_VLLM_PYTHON=python3 ROOKERY_GPU_MODEL=/path/to/model pytest tests/gpu/test_bridges.py
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from bridge_training import Training, config_of, training
from fleet.stub import until
from tiny_training import make_batch

from rookery.compose.grpo.bridge import Bridge, Bridged, adapter_publisher
from rookery.errors import FleetError
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.bridges.alias import share_base
from rookery.loops.grpo.policy_weights import POLICY
from rookery.slots.loading import attach_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.full import read_model_weights
from rookery.types import ModelRef, OptimStep, SampleRequest, SamplingParams, TrainRequest

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
MODEL = os.environ.get("ROOKERY_GPU_MODEL", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.skipif(not MODEL, reason="ROOKERY_GPU_MODEL names no model folder"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1500),
]
NEAR = 0.25
"""Between a trainer and a server in bfloat16, in nats: a rounded logit of the likeliest token."""
LIBRARIES = 64 * 2**20
"""What cuBLAS and a recorded pass take for themselves, whatever the model's size."""
PROMPT = tuple(range(100, 140))
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
LAUNCH = {
    "model": MODEL, "python": PYTHON, "device": "cuda", "dtype": "bfloat16",
    "max_model_len": 1024, "gpu_memory_utilization": 0.3, "restarts": 1, "env": ENV,
}  # fmt: skip


async def draw(fleet: Fleet, ref: ModelRef, num_tokens: int = 16) -> tuple[float, ...]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    [[one]] = await fleet.sample([SampleRequest(model=ref, prompt=PROMPT, params=params)])
    assert len(one.tokens) == num_tokens
    return one.logprobs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Training]:
    """A trainer of all weights over the memory of a server with CUDA graphs."""
    folder = tmp_path_factory.mktemp("models")
    async with training(config_of("auto", **LAUNCH), folder, device="cuda") as own:
        yield own


async def test_trainer_and_server_have_one_copy(trained: Training) -> None:
    assert trained.bridge.name == "alias", trained.bridge.why
    held = sum(weight.nbytes for weight in trained.model.weights.values())
    masters = sum(p.nbytes for p in trained.trainer.trainee(POLICY).parameters)
    own = torch.cuda.memory_allocated() - masters
    assert own < 0.02 * held + LIBRARIES, "besides the float32 masters"
    await trained.trainer.publish(POLICY)
    assert await trained.gap() < NEAR
    before = await draw(trained.fleet, trained.fleet.base)
    for _ in range(5):
        await trained.step(learning_rate=1e-5)
        assert await trained.gap() < NEAR
    assert await draw(trained.fleet, trained.fleet.base) != before


async def test_what_is_in_flight_goes_on_with_the_new_weights(trained: Training) -> None:
    ref = trained.fleet.base
    asked = asyncio.create_task(draw(trained.fleet, ref, num_tokens=800))
    await until(lambda: trained.fleet.pool.replicas[0].load.num_sequences)
    await trained.step(learning_rate=1e-5)
    assert len(await asked) == 800
    with pytest.raises(FleetError, match="is not loaded"):
        await draw(trained.fleet, ref)


async def test_a_server_that_dies_takes_its_memory_with_it(trained: Training) -> None:
    [replica] = trained.fleet.pool.replicas
    local = replica.local
    assert local is not None
    local.kill()
    await local.wait_ended()
    trained.fleet.pool.suspect(replica, "killed")
    await until(lambda: "memory of its GPU" in replica.excluded, limit_s=600)
    assert local.is_alive and not replica.load.is_open, "it has the weights of its folder"


async def test_it_takes_copies_as_any_server_does(trained: Training, tmp_path: Path) -> None:
    """After the one before: it can share its memory no more, and is given a copy."""
    bridge = Bridge("copy", "for comparison")
    opened = Bridged(engine=trained.fleet, model=trained.model, bridge=bridge, folder=tmp_path)
    others = opened.publish_model(trained.trainer, like=Path(MODEL))
    weights = read_model_weights(Path(MODEL), name="other", dtype=torch.bfloat16)
    ref = await others.publish(weights)
    assert trained.fleet.base == ref and await draw(trained.fleet, ref)


async def test_an_adapter_is_read_where_it_is_trained() -> None:
    """Requests in flight keep their version, the base of both is one copy."""
    launch = LaunchConfig(**LAUNCH, max_loras=4, max_cpu_loras=8, replicas=1)  # type: ignore[arg-type]
    async with open_fleet(FleetConfig(launch=launch, in_place=True)) as fleet:
        shared = await share_base(fleet)
        model = await asyncio.to_thread(attach_model, Path(MODEL), shared.find)
        trainer = LoraTrainer(model, config=TrainerConfig(pass_tokens=256))
        start = initial_adapter(model, LoraConfig(rank=16), name=POLICY, base="", seed=0)
        trainer.add(POLICY, start)
        trainer.publish_to(adapter_publisher(fleet, trainer, model=model))
        refs = [await trainer.publish(POLICY)]
        for _ in range(3):
            data = tuple(make_batch((12, 9, 15)))
            await trainer.forward_backward([TrainRequest(trainee=POLICY, data=data)])
            await trainer.optim_step([OptimStep(trainee=POLICY, learning_rate=1e-2)])
            asked = asyncio.create_task(draw(fleet, refs[-1], num_tokens=400))
            await until(lambda: fleet.pool.replicas[0].load.num_sequences)
            refs.append(await trainer.publish(POLICY))
            assert len(await asked) == 400
        assert [ref.version for ref in refs] == ["step-0", "step-1", "step-2", "step-3"]
        assert await draw(fleet, refs[-1]) != await draw(fleet, fleet.base)
        with pytest.raises(FleetError, match="is not loaded"):
            await draw(fleet, refs[0])
