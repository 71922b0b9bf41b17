"""The full-weight trainer beside transformers and torch, and what it writes."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import tiny_adapter, write_tiny_model
from tiny_training import make_batch, make_trainer, step, train
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rookery.embedded import EngineConfig, open_engine
from rookery.errors import TrainError
from rookery.ports import Trainer
from rookery.slots import load_model
from rookery.train import FullConfig, FullTrainer, ModelPublisher
from rookery.train.schedule import OptimizerKind
from rookery.train.trainee import Trainee
from rookery.types import (
    Datum,
    ModelRef,
    ModelWeights,
    OptimStep,
    ScoreRequest,
    TrainRequest,
    Weights,
)

KINDS: dict[str, Any] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}

SLOW_BFLOAT16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
"""A CPU without bfloat16 says so once."""


def make_full(folder: Path, *, dtype: str = "auto", **options: Any) -> FullTrainer:
    config = FullConfig(**options)
    return FullTrainer(load_model(folder, dtype=dtype), name="policy", config=config, like=folder)


def plain_loss(model: Any, batch: Sequence[Datum]) -> torch.Tensor:
    total = torch.zeros(())
    for datum in batch:
        logprobs = model(torch.tensor([datum.tokens])).logits[0].float().log_softmax(-1)
        weights = torch.tensor(datum.weights)
        total = total - (weights * logprobs[list(datum.positions), list(datum.targets)]).sum()
    return total


def weights_in(trainer: FullTrainer) -> dict[str, torch.Tensor]:
    tensors = trainer.weights_of(trainer.trainee("policy"), name="policy").tensors
    return dict(tensors)


@pytest.mark.parametrize(("kind", "layers"), [("tied", "all"), ("untied", 2)])
async def test_three_steps_are_those_of_transformers_and_torch(
    tmp_path: Path, kind: str, layers: Any
) -> None:
    """With gradients accumulated over two calls, some layers or all, tied or not."""
    folder = write_tiny_model(tmp_path / "model", **KINDS[kind])
    trainer = make_full(folder, layers=layers, pass_tokens=20)
    assert isinstance(trainer, Trainer)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    named = dict(reference.named_parameters())
    trained = {n: p for n, p in named.items() if layers == "all" or ".2." in n or ".3." in n}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    for seed in range(3):
        batch = make_batch(seed=seed)
        for part in (batch[:2], batch[2:]):
            await train(trainer, part)
        await step(trainer, 1e-2, weight_decay=0.1, max_grad_norm=0.5)
        wanted_gradients = torch.autograd.grad(plain_loss(reference, batch), [*trained.values()])
        for parameter, gradient in zip(trained.values(), wanted_gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
    found = weights_in(trainer)
    assert found.keys() == named.keys()
    for name, wanted in named.items():
        torch.testing.assert_close(found[name], wanted.detach(), atol=2e-4, rtol=0)
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = {name for name in found if not torch.equal(found[name], start[name])}
    assert moved == set(trained)


async def test_layers_computed_again_give_the_same_bits(tiny_folder: Path) -> None:
    outputs = []
    for again in (False, True):
        trainer = make_full(tiny_folder, checkpoint_layers=again)
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
        outputs.append(weights_in(trainer))
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])


@SLOW_BFLOAT16
async def test_small_steps_of_a_16_bit_model_add_up(tiny_folder: Path) -> None:
    """Steps too small for bfloat16 each: the float32 weights keep them, the model follows."""
    trainer = make_full(tiny_folder, dtype="bfloat16")
    start = weights_in(trainer)
    name = "model.layers.1.mlp.up_proj.weight"
    for _ in range(25):
        await train(trainer, make_batch((9,)))
        await step(trainer, 4e-5)
    found = weights_in(trainer)
    assert found[name].dtype == torch.bfloat16
    assert {p.dtype for p in trainer.trainee("policy").parameters} == {torch.float32}
    assert (found[name] != start[name]).float().mean() > 0.5


@SLOW_BFLOAT16
async def test_a_state_goes_on_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    """Saved between two calls of a step, in 32 and in 16 bit."""
    for dtype in ("float32", "bfloat16"):
        whole, first = make_full(tiny_folder, dtype=dtype), make_full(tiny_folder, dtype=dtype)
        for trainer in (whole, first):
            await train(trainer, make_batch(seed=0))
            await step(trainer, 1e-2)
            await train(trainer, make_batch(seed=1))
        await first.save("policy", tmp_path / dtype)
        second = make_full(tiny_folder, dtype=dtype)
        await second.load("policy", tmp_path / dtype)
        for trainer in (whole, second):
            await train(trainer, make_batch(seed=2))
            await step(trainer, 1e-2)
        wanted, found = weights_in(whole), weights_in(second)
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert second.trainee("policy").num_steps == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_an_export_is_a_folder_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "model", **KINDS[kind])
    trainer = make_full(folder)
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    await trainer.export("policy", tmp_path / "step_1")
    assert sorted(os.listdir(tmp_path)) == ["model", "step_1"]
    batch = make_batch(seed=5)
    [output] = await trainer.forward([TrainRequest(trainee="policy", data=tuple(batch))])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1").eval()
    wanted = plain_loss(loaded, batch).item()
    assert output.metrics["train/loss_sum"] == pytest.approx(wanted, rel=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "step_1")("w7 w9").input_ids == [7, 9]
    again = make_full(tmp_path / "step_1")
    wanted_weights, found = weights_in(trainer), weights_in(again)
    assert all(torch.equal(wanted_weights[name], found[name]) for name in wanted_weights)
    with pytest.raises(TrainError, match="step_1 exists: give a new path"):
        await trainer.export("policy", tmp_path / "step_1")


class Shelf:
    """A publisher that keeps what it gets."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []

    async def publish(self, weights: Weights) -> ModelRef:
        self.weights.append(weights)
        return ModelRef(name=weights.name, version=weights.version)


async def test_publishing_hands_over_a_copy_under_a_new_version(tiny_folder: Path) -> None:
    shelf = Shelf()
    model = load_model(tiny_folder)
    trainer = FullTrainer(
        model, name="policy", config=FullConfig(), like=tiny_folder, publisher=shelf
    )
    first, same = await trainer.publish("policy"), await trainer.publish("policy")
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    second = await trainer.publish("policy")
    assert first == same and first.version != second.version
    before = shelf.weights[0]
    assert isinstance(before, ModelWeights)
    start = load_model(tiny_folder).weights
    assert before.tensors.keys() == start.keys()
    assert all(torch.equal(before.tensors[name], start[name]) for name in start)


def test_more_layers_than_there_are_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(TrainError, match="layers is 9; this model has 4: write 1 to 4, or all"):
        make_full(tiny_folder, layers=9)


async def test_an_engine_answers_with_what_was_published(tiny_folder: Path) -> None:
    """A packed engine in this process: its log-probabilities are the trainer's after each step."""
    datum = make_batch((20,), seed=3)[0]
    tokens = (*datum.tokens, datum.targets[-1])
    async with open_engine(EngineConfig(model=str(tiny_folder))) as engine:
        trainer = FullTrainer(
            load_model(tiny_folder), name="policy", config=FullConfig(), like=tiny_folder,
            publisher=ModelPublisher(engine.replace_base),
        )  # fmt: skip
        seen = []
        for seed in range(3):
            await train(trainer, make_batch(seed=seed))
            await step(trainer, 1e-2)
            ref = await trainer.publish("policy")
            [score] = await engine.score([ScoreRequest(model=ref, tokens=tokens, start=1)])
            [output] = await trainer.forward([TrainRequest(trainee="policy", data=(datum,))])
            assert score.logprobs == pytest.approx(output.logprobs[0], abs=1e-4)
            seen.append(score.logprobs[-1])
        assert len(set(seen)) == 3
        with pytest.raises(TrainError, match="poet is an adapter"):
            await ModelPublisher(engine.replace_base).publish(tiny_adapter("poet"))


def test_8_bit_moments_need_torchao(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(TrainError, match=r"pip install .*\[optim\]'?, or write adamw"):
        make_full(tiny_folder, optimizer="adamw_8bit")


# Exported weights, in the programs that load them.


async def test_peft_loads_an_exported_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(load_model(tiny_folder))
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    await trainer.export("policy", tmp_path / "exported")
    output = await train(trainer, make_batch(seed=9))
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "exported")
    datum = make_batch(seed=9)[0]
    with torch.no_grad():
        table = loaded.eval()(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
    wanted = table[list(datum.positions), list(datum.targets)].tolist()
    assert output.logprobs[0] == pytest.approx(wanted, abs=1e-4)


# 8-bit moments.


STEP = OptimStep(trainee="policy", learning_rate=1e-2)


def make_trainee(kind: OptimizerKind) -> Trainee:
    """One weight large enough to have 8-bit moments, and one that is not."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (64, 64), "small": (7,)}
    weights = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}
    return Trainee(weights, fixed={}, optimizer=kind)


def take_steps(trainee: Trainee, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=generator) for p in trainee.parameters]
        trainee.add_gradients(gradients)
        trainee.step(STEP)


@pytest.mark.filterwarnings("ignore")  # torch's compiler and torchao warn of their own code
def test_8_bit_moments_are_restored_exactly(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim", reason="torchao (the extra optim) is not installed")
    whole, first, second = (make_trainee("adamw_8bit") for _ in range(3))
    with torch.compiler.set_stance("force_eager"):
        take_steps(whole, range(4))
        take_steps(first, range(2))
        first.save(tmp_path / "state")
        second.load(tmp_path / "state")
        take_steps(second, range(2, 4))
    pairs = list(zip(whole.parameters, second.parameters, strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    plain = make_trainee("adamw")
    start = [p.detach().clone() for p in plain.parameters]
    take_steps(plain, range(4))
    for wanted, found, before in zip(plain.parameters, whole.parameters, start, strict=True):
        update, other = (wanted - before).flatten(), (found - before).flatten()
        assert torch.cosine_similarity(update, other, dim=0) > 0.98
    with pytest.raises(TrainError, match="other layers, ranks or scales"):
        make_trainee("adamw").load(tmp_path / "state")
