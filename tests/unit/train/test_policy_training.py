"""Losses of drawn tokens through a trainer: packed, tempered, cut down to kept tokens, in calls."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import make_batch, make_trainer, train

from rookery.slots import SlottedModel, load_model
from rookery.train import TrainerConfig
from rookery.train.averaging import averaged, merged_metrics
from rookery.train.losses import PolicyLoss, make_loss
from rookery.types import Datum, TrainRequest

POLICY = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "ppo", "reinforce")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


async def drawn_batch(model: SlottedModel, *, shift: float = 0.0) -> list[Datum]:
    """As if drawn by the trainer itself, at temperature 0.7 and from a few kept tokens each."""
    batch = [
        replace(
            datum,
            weights=tuple(float(weight > 0) for weight in datum.weights),
            temperature=0.7,
            kept=tuple(
                tuple(dict.fromkeys((target, 3, 50, 81))) if target % 2 else ()
                for target in datum.targets
            ),
        )
        for datum in make_batch((9, 4, 17, 12, 30))
    ]
    request = TrainRequest(trainee="policy", data=tuple(batch))
    [output] = await make_trainer(model).forward([request])
    assert output.error == ""
    generator = torch.Generator().manual_seed(1)

    def moved(logprobs: tuple[float, ...]) -> tuple[float, ...]:
        noise = torch.randn(len(logprobs), generator=generator) * shift
        return tuple((torch.tensor(logprobs) + noise).tolist())

    return [
        replace(
            datum,
            sampled_logprobs=moved(logprobs),
            old_logprobs=moved(logprobs),
            reference_logprobs=moved(logprobs),
            advantages=(float(2 * (number % 2) - 1),) * len(logprobs),
        )
        for number, (datum, logprobs) in enumerate(zip(batch, output.logprobs, strict=True))
    ]


def gradients(trainer: Any) -> list[torch.Tensor]:
    found = trainer.trainee("policy").gradients
    assert found is not None
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize("name", POLICY)
async def test_at_the_weights_that_drew_the_ratio_is_1(model: SlottedModel, name: str) -> None:
    data = await drawn_batch(model)
    metrics = (await train(make_trainer(model), data, name, {"kl": {}})).metrics
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/mismatch_max"] < 1e-4 and abs(metrics["train/kl"]) < 1e-6
    assert metrics.get("train/clip_low", 0.0) == 0.0


@pytest.mark.parametrize("name", POLICY)
async def test_passes_and_calls_do_not_change_gradients_nor_metrics(
    model: SlottedModel, name: str
) -> None:
    """A sequence's ratio and correction are whole however its step is cut up."""
    options: dict[str, Any] = {
        "ratio_to": "current" if name == "reinforce" else "old",
        "correction": {"level": "sequence", "maximum": 1.5},
        "kl": {"estimator": "k2"},
    }
    loss = make_loss(name, options)
    assert isinstance(loss, PolicyLoss)
    average = "token" if loss.average == "call" else loss.average
    data = await drawn_batch(model, shift=0.3)
    cuts: list[tuple[int, list[list[Datum]]]] = [
        (1024, [data]),
        (1, [data]),
        (25, [data[:1], data[1:3], data[3:]]),
    ]
    found = []
    for pass_tokens, calls in cuts:
        trainer = make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
        weighted = averaged(calls, average, max_tokens=30)
        outputs = [await train(trainer, call, name, options) for call in weighted]
        found.append((gradients(trainer), merged_metrics([o.metrics for o in outputs])))
    (whole, metrics), *others = found
    assert any(gradient.abs().max() > 1e-4 for gradient in whole)
    for other, other_metrics in others:
        assert other_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-4)
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


async def test_a_missing_column_is_a_sentence(model: SlottedModel) -> None:
    data = [replace(d, old_logprobs=()) for d in await drawn_batch(model)]
    request = TrainRequest(
        trainee="policy", data=tuple(data), loss="grpo", loss_options={"ratio_to": "old"}
    )
    [output] = await make_trainer(model).forward_backward([request])
    assert "targets and 0 old_logprobs; give one per target" in output.error


async def test_layers_computed_again_give_the_same_gradients(model: SlottedModel) -> None:
    data = await drawn_batch(model, shift=0.3)
    found = []
    for again in (False, True):
        trainer = make_trainer(model, config=TrainerConfig(checkpoint_layers=again))
        await train(trainer, data, "grpo")
        found.append(gradients(trainer))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
