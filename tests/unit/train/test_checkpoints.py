"""Checkpoints: what is in the folder, what goes on from it, what a kill leaves."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_training import make_batch, make_trainer, step, train
from transformers import AutoModelForCausalLM

from rookery.errors import TrainError
from rookery.slots import load_model
from rookery.train import FullConfig, FullTrainer
from rookery.train.checkpoints import Checkpoints

KINDS = {"full": "step_", "lora": "adapter_step_"}


def trainer_of(kind: str, folder: Path) -> Any:
    model = load_model(folder)
    if kind == "lora":
        return make_trainer(model)
    return FullTrainer(model, name="policy", config=FullConfig(), like=folder)


async def steps(trainer: Any, seeds: range) -> None:
    for seed in seeds:
        await train(trainer, make_batch(seed=seed))
        await step(trainer, 1e-2)


def parameters(trainer: Any) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.trainee("policy").parameters]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_training_goes_on_from_a_checkpoint(
    kind: str, tiny_folder: Path, tmp_path: Path
) -> None:
    whole, first, second = (trainer_of(kind, tiny_folder) for _ in range(3))
    await steps(whole, range(4))
    await steps(first, range(2))
    await Checkpoints(tmp_path, first, "policy", keep=2).write(step=2)
    checkpoints = Checkpoints(tmp_path, second, "policy", keep=2)
    await checkpoints.restore(step=checkpoints.steps[-1])
    await steps(second, range(2, 4))
    pairs = zip(parameters(whole), parameters(second), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(TrainError, match=r"no checkpoint of step 7\. There are: 2\."):
        await checkpoints.restore(step=7)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_newest_are_kept(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tiny_folder)
    checkpoints = Checkpoints(tmp_path, trainer, "policy", keep=2)
    for number in (1, 2, 10):
        await checkpoints.write(step=number)
    assert checkpoints.steps == [2, 10]
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"{KINDS[kind]}{n}" for n in (2, 10)] + [f"trainer_step_{n}.safetensors" for n in (2, 10)]
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_kill_left_is_no_checkpoint_and_is_replaced(
    kind: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Weights without a state, and a folder half-written."""
    trainer = trainer_of(kind, tiny_folder)
    checkpoints = Checkpoints(tmp_path, trainer, "policy", keep=0)
    await checkpoints.write(step=3)
    os.remove(tmp_path / "trainer_step_3.safetensors")
    os.mkdir(tmp_path / f".{KINDS[kind]}3.abc")
    assert checkpoints.steps == []
    await checkpoints.write(step=3)
    assert checkpoints.steps == [3]
    assert set(os.listdir(tmp_path)) == {f"{KINDS[kind]}3", "trainer_step_3.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
async def test_other_programs_load_the_weights(
    kind: str, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(kind, tiny_folder)
    await steps(trainer, range(2))
    folder = await Checkpoints(tmp_path, trainer, "policy", keep=1).write(step=2)
    output = await train(trainer, make_batch(seed=9))
    if kind == "full":
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    else:
        base = AutoModelForCausalLM.from_pretrained(tiny_folder)
        loaded = PeftModel.from_pretrained(base, folder)
    datum = make_batch(seed=9)[0]
    with torch.no_grad():
        table = loaded.eval()(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
    wanted = table[list(datum.positions), list(datum.targets)].tolist()
    assert output.logprobs[0] == pytest.approx(wanted, abs=1e-4)
