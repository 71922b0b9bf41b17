"""The trainer's gradients and steps are those of transformers, peft and torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import tiny_adapter, write_tiny_model
from tiny_training import ATTENTION, gradients_of, make_batch, make_trainer, step, train
from transformers import AutoModelForCausalLM

from rookery.config import parse_config
from rookery.errors import ConfigError, TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, initial_adapter
from rookery.train.lora_trainee import target_layers
from rookery.types import Adapter, Datum
from rookery.weights import write_adapter


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


def peft_model(folder: Path, start: Adapter, tmp_path: Path) -> PeftModel:
    write_adapter(start, tmp_path / start.name)
    base = AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(base, tmp_path / start.name, is_trainable=True).eval()


def peft_loss(model: PeftModel, batch: Sequence[Datum]) -> torch.Tensor:
    total = torch.zeros(())
    for datum in batch:
        logprobs = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        for position, target, weight in zip(
            datum.positions, datum.targets, datum.weights, strict=True
        ):
            total = total - weight * logprobs[position, target]
    return total


async def sorted_gradients(trainer: LoraTrainer, batch: Sequence[Datum]) -> list[torch.Tensor]:
    """By the names of their parameters, as `peft_parameters` are."""
    found = await gradients_of(trainer, batch)
    by_name = dict(zip(trainer.trainee("policy").names, found, strict=True))
    return [by_name[name] for name in sorted(by_name)]


def peft_parameters(model: PeftModel) -> list[torch.nn.Parameter]:
    """Layers sorted, A then B."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [named[name] for name in sorted(named)]


STARTS = {
    "every linear layer": tiny_adapter("all"),
    "the last two layers": tiny_adapter("last", layers=range(2, 4), targets=ATTENTION, rank=3),
    "one layer in the middle": tiny_adapter("middle", layers=range(1, 2), scale=0.25),
}


@pytest.mark.parametrize("which", STARTS)
async def test_gradients_equal_those_of_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path, which: str
) -> None:
    start, batch = STARTS[which], make_batch()
    reference = peft_model(tiny_folder, start, tmp_path)
    torch.autograd.backward(peft_loss(reference, batch))
    got = await sorted_gradients(make_trainer(model, start), batch)
    expected = [parameter.grad for parameter in peft_parameters(reference)]
    assert len(got) == len(expected) == 2 * len(start.factors)
    for mine, theirs in zip(got, expected, strict=True):
        assert theirs is not None and theirs.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


async def test_an_adapter_of_the_head_gets_the_gradients_of_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    config = LoraConfig(rank=2, targets=("lm_head", "up_proj"), layers=1)
    start = initial_adapter(model, config, name="head", base="tiny", seed=0)
    assert list(start.factors) == ["lm_head", "model.layers.3.mlp.up_proj"]
    batch = make_batch()
    reference = peft_model(tiny_folder, start, tmp_path)
    torch.autograd.backward(peft_loss(reference, batch))
    got = await sorted_gradients(make_trainer(model, start), batch)
    for mine, theirs in zip(got, peft_parameters(reference), strict=True):
        torch.testing.assert_close(mine, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Gemma2", "Phi3"])
async def test_other_architectures_get_the_gradients_of_peft(kind: str, tmp_path: Path) -> None:
    """Gemma 2 caps its logits and slides its window; Phi 3 has fused layers."""
    extra = {"head_dim": 8, "sliding_window": 6} if kind == "Gemma2" else {"sliding_window": 6}
    folder = write_tiny_model(tmp_path / kind, kind, **extra)
    model = load_model(folder)
    config = LoraConfig(rank=2, targets=("o_proj", "down_proj"), layers=3)
    start = initial_adapter(model, config, name="start", base=kind, seed=0)
    batch = make_batch()
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    write_adapter(start, tmp_path / "start")
    reference = PeftModel.from_pretrained(reference, tmp_path / "start", is_trainable=True).eval()
    torch.autograd.backward(peft_loss(reference, batch))
    got = await sorted_gradients(make_trainer(model, start), batch)
    for mine, theirs in zip(got, peft_parameters(reference), strict=True):
        torch.testing.assert_close(mine, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
async def test_steps_equal_torch_adamw_on_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path, max_grad_norm: float
) -> None:
    start = tiny_adapter("start", layers=range(2, 4), scale=2.0)
    optimizer_values = {
        # A large epsilon: without it AdamW turns the rounding of tiny gradients into whole steps.
        "beta1": 0.8,
        "beta2": 0.95,
        "epsilon": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": max_grad_norm,
    }
    trainer = make_trainer(model, start)
    reference = peft_model(tiny_folder, start, tmp_path)
    optimizer = torch.optim.AdamW(
        peft_parameters(reference), betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1
    )
    for number, rate in enumerate((1e-2, 5e-3, 2e-2)):
        batch = make_batch(seed=number)
        outputs = [await train(trainer, part) for part in (batch[:2], batch[2:])]
        total = sum(output.metrics["train/loss_sum"] for output in outputs)
        loss = peft_loss(reference, batch)
        assert total == pytest.approx(loss.item(), rel=1e-5)
        torch.autograd.backward(loss)
        gradients = [p.grad for p in peft_parameters(reference) if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(peft_parameters(reference), max_grad_norm)
            assert norm > max_grad_norm
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        metrics = await step(trainer, rate, **optimizer_values)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["train/learning_rate"] == rate
    mine = [t for lora in trainer.adapter("policy").factors.values() for t in (lora.a, lora.b)]
    for got, theirs in zip(mine, peft_parameters(reference), strict=True):
        torch.testing.assert_close(got, theirs.detach(), atol=1e-5, rtol=1e-4)
    assert trainer.trainee("policy").num_steps == 3


# Which layers an adapter gets, and what it starts from.


def test_targets_are_ends_of_names_and_layers_the_last_ones(model: SlottedModel) -> None:
    config = LoraConfig(targets=("q_proj", "mlp.up_proj"), layers=2)
    assert target_layers(model, config) == [
        "model.layers.2.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
        "model.layers.3.mlp.up_proj",
        "model.layers.3.self_attn.q_proj",
    ]
    assert len(target_layers(model, LoraConfig())) == 16
    assert target_layers(model, LoraConfig(targets=("lm_head",), layers=1)) == ["lm_head"]


def test_a_new_adapter_is_the_zero_of_peft(model: SlottedModel) -> None:
    config = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
    one = initial_adapter(model, config, name="one", base="tiny", seed=1)
    for name, lora in one.factors.items():
        linear = model.linears[name]
        assert lora.a.shape == (4, linear.in_features)
        assert not lora.b.any() and lora.b.shape == (linear.out_features, 4)
        assert lora.scale == 1.5
        bound = linear.in_features**-0.5
        assert lora.a.abs().max() <= bound
        assert lora.a.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    again = initial_adapter(model, config, name="again", base="tiny", seed=1)
    other = initial_adapter(model, config, name="other", base="tiny", seed=2)
    assert one.version == again.version != other.version
    a, b = (one.factors[f"model.layers.{i}.self_attn.q_proj"].a for i in (0, 1))
    assert not torch.equal(a, b)


def test_targets_that_are_not_there_are_named(model: SlottedModel) -> None:
    with pytest.raises(TrainError, match=r"'q_prj'.*Did you mean q_proj\? There are: down_proj"):
        target_layers(model, LoraConfig(targets=("q_prj",)))
    with pytest.raises(TrainError, match=r"layers is 5; this model has 4: write 1 to 4, or all"):
        target_layers(model, LoraConfig(layers=5))
    documents: list[dict[str, Any]] = [
        {"layers": 0}, {"layers": "some"}, {"targets": []}, {"rank": 0},
    ]  # fmt: skip
    for document in documents:
        with pytest.raises(ConfigError, match=next(iter(document))):
            parse_config(LoraConfig, document, origin="test")
