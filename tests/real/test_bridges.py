"""Weights in training published to real vLLM servers on the CPU: every bridge, proved."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bridge_training
import pytest
import torch
from bridge_training import training
from fleet.stub import until
from marks import long
from safetensors.torch import load_file
from tests.real.peers import needs_vllm, served_on_cpu
from tiny import write_tiny_model
from tiny_training import make_batch

from rookery.compose.grpo.bridge import adapter_publisher
from rookery.errors import FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges import alias
from rookery.fleet.bridges.update import Canary
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY
from rookery.slots import load_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.types import OptimStep, SampleRequest, SamplingParams, TrainRequest

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
NEAR = 1e-4
"""Between a float32 trainer and a float32 server, in nats."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
    }
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", **sizes)


def config_of(folder: Path, bridge: str, **launch: Any) -> GrpoConfig:
    own = served_on_cpu(folder, max_model_len=512)
    return bridge_training.config_of(bridge, **{**own, **launch})


@pytest.mark.parametrize("bridge", ["auto", "copy", "reload", "restart"])
async def test_servers_have_the_trainers_weights_after_every_step(
    bridge: str, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, bridge)
    async with training(config, tmp_path) as trained:
        assert trained.bridge.name == ("alias" if bridge == "auto" else bridge)
        await trained.trainer.publish(POLICY)
        assert await trained.gap() < NEAR
        first = {name: w.detach().clone() for name, w in trained.model.weights.items()}
        for _ in range(1 if bridge == "restart" else 5):
            await trained.step()
            assert await trained.gap() < NEAR
        moved = [not torch.equal(first[n], w) for n, w in trained.model.weights.items()]
        assert all(moved), "every weight was trained"


@long
async def test_two_hundred_clean_publishes_raise_no_alarm(folder: Path, tmp_path: Path) -> None:
    async with training(config_of(folder, "alias"), tmp_path) as trained:
        await trained.trainer.publish(POLICY)
        for _ in range(200):
            await trained.step(learning_rate=1e-3)
        assert await trained.gap() < NEAR


async def test_two_servers_and_a_trainer_have_one_copy(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "alias", replicas=2, restarts=1)
    async with training(config, tmp_path) as trained:
        await trained.trainer.publish(POLICY)
        for _ in range(2):
            await trained.step()
        assert await trained.gap() < NEAR
        replica = trained.fleet.pool.replicas[1]
        local = replica.local
        assert local is not None
        local.kill()  # it comes back with the weights of its folder
        await local.wait_ended()
        trained.fleet.pool.suspect(replica, "killed")
        await until(lambda: local.is_alive and replica.load.is_open, limit_s=600)
        assert await trained.gap() < NEAR
        await trained.step()
        assert await trained.gap() < NEAR


async def test_an_answer_tells_which_weights_drew_its_tokens(folder: Path, tmp_path: Path) -> None:
    """vLLM 0.32 does; what is in flight goes on with the new weights."""
    async with training(config_of(folder, "alias"), tmp_path) as trained:
        fleet = trained.fleet
        await trained.trainer.publish(POLICY)
        first = fleet.base
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        request = SampleRequest(model=first, prompt=(5, 6, 7), params=params)
        asked = asyncio.create_task(fleet.sample([request]))
        await until(lambda: fleet.pool.replicas[0].load.num_sequences)
        await trained.step()
        [[answer]] = await asked
        spans = answer.version_spans
        assert [span.version for span in spans] == [first.version, fleet.base.version]
        assert (spans[0].start, spans[0].stop, spans[1].stop) == (0, spans[1].start, 400)
        assert answer.model == fleet.base


async def test_an_adapter_in_training_is_served_after_every_step(folder: Path) -> None:
    engine = config_of(folder, "auto", max_loras=3, max_lora_rank=8).engine
    assert isinstance(engine, FleetConfig)
    async with open_fleet(engine) as fleet:
        model = load_model(folder)
        trainer = LoraTrainer(model, config=TrainerConfig(pass_tokens=256))
        start = initial_adapter(model, LoraConfig(rank=8), name=POLICY, base="", seed=0)
        trainer.add(POLICY, start)
        trainer.publish_to(adapter_publisher(fleet, trainer, model=model))
        canary = Canary.of(fleet.capabilities, is_float32=True)
        [replica] = fleet.pool.replicas
        ref = await trainer.publish(POLICY)
        for _ in range(5):
            params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
            request = SampleRequest(model=ref, prompt=(5, 6, 7), params=params)
            asked = asyncio.create_task(fleet.sample([request]))
            await until(lambda: replica.load.num_sequences)
            data = tuple(make_batch((12, 9, 15)))
            await trainer.forward_backward([TrainRequest(trainee=POLICY, data=data)])
            await trainer.optim_step([OptimStep(trainee=POLICY, learning_rate=1e-2)])
            newest = await trainer.publish(POLICY)
            [[answer]] = await asked
            assert answer.model == ref != newest, "it keeps its version"
            ref = newest
            [output] = await trainer.forward([TrainRequest(trainee=POLICY, data=(canary.datum,))])
            found = await canary.read(replica, ref, fleet.find(ref))
            assert canary.gap(found, output.logprobs[0]) < NEAR


async def test_weights_that_are_spread_over_workers_are_copied(
    folder: Path, tmp_path: Path
) -> None:
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
    with pytest.raises(FleetError, match="each of 2 workers has a part"):
        async with training(config_of(folder, "alias", tensor_parallel=2, env=bind), tmp_path):
            pass
    async with training(config_of(folder, "auto", tensor_parallel=2, env=bind), tmp_path) as own:
        assert own.bridge.name == "copy" and "2 workers" in own.bridge.why
        await own.trainer.publish(POLICY)
        assert await own.gap() < NEAR
        await own.step()
        assert await own.gap() < NEAR


def test_weights_that_two_processes_train_are_copied(folder: Path, tmp_path: Path) -> None:
    """FSDP2: each has a part of them. A server that did not get them would end the run."""
    (tmp_path / "reward.py").write_text(
        "def score(task, completion):\n    return completion.tokens[0] % 7 / 7\n"
    )
    rows = [{"prompt": f"w{4 + i}", "reference": "x"} for i in range(24)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = config_of(folder, "auto").model_dump(mode="json", exclude_unset=True) | {
        "tasksets": [{
            "type": "jsonl", "path": "tasks.jsonl", "sampling": {"max_tokens": 4},
            "scorer": {"type": "python", "function": "reward.py:score"},
        }],
        "steps": 2, "groups_per_step": 4, "group_size": 4, "drawing": {"max_tokens": 4},
        "save_every": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *command, "-m", "rookery", "grpo", "run", "run.yaml", "--name", "run"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=1100, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "copy" in said and "2 processes of torchrun" in said
    last = tmp_path / "runs/run/checkpoints/step_2"  # which is not always the one that is chosen
    first, trained = (load_file(place / "model.safetensors") for place in (folder, last))
    assert any(not torch.equal(first[name], trained[name]) for name in first)


async def test_prefixes_of_older_weights_are_found_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(config_of(folder, "alias"), tmp_path) as trained:
        await trained.trainer.publish(POLICY)
        await trained.step()
        monkeypatch.setattr(alias, "PAUSE", "/pause?mode=keep&clear_cache=false")
        with pytest.raises(FleetError, match="cached for older weights"):
            await trained.step()


async def test_an_old_output_layer_is_found_out(tmp_path: Path) -> None:
    """vLLM on the CPU packs it, and keeps the packed one of tied embeddings."""
    sizes: dict[str, Any] = {"hidden_size": 128, "tie_word_embeddings": True}
    folder = write_tiny_model(tmp_path / "tied", **sizes)
    config = config_of(folder, "reload", max_loras=0, max_model_len=128)
    async with training(config, tmp_path, is_as_configured=True) as trained:
        await trained.trainer.publish(POLICY)
        with pytest.raises(FleetError, match="live_weights"):
            await trained.step()
