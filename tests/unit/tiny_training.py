"""Batches and trainers of the tiny model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny import VOCAB, tiny_adapter

from rookery.ports import Trainer
from rookery.slots import SlottedModel
from rookery.train import LoraTrainer, TrainerConfig
from rookery.types import Adapter, Datum, Json, OptimStep, TrainOutput, TrainRequest

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")


def next_tokens(tokens: Sequence[int], weights: Sequence[float], **columns: Any) -> Datum:
    """Every token from the one before it; the first has nothing to be predicted from."""
    return Datum(
        tokens=tuple(tokens[:-1]),
        positions=tuple(range(len(tokens) - 1)),
        targets=tuple(tokens[1:]),
        weights=tuple(weights[1:]),
        **columns,
    )


def make_batch(lengths: Sequence[int] = (9, 4, 17, 2, 12), *, seed: int = 0) -> list[Datum]:
    """Random rows; the first half of each has no weight, the others have weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in lengths:
        tokens = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        weights = torch.rand(length, generator=generator).tolist()
        prompt = max(1, length // 2)
        batch.append(next_tokens(tokens, [0.0] * prompt + weights[prompt:]))
    return batch


def make_trainer(
    model: SlottedModel, start: Adapter | None = None, config: TrainerConfig | None = None
) -> LoraTrainer:
    """With one trainee, `policy`."""
    trainer = LoraTrainer(model, config=config or TrainerConfig())
    trainer.add("policy", start or tiny_adapter("start", layers=range(2, 4)))
    return trainer


async def train(
    trainer: Trainer,
    batch: Sequence[Datum],
    loss: str = "cross_entropy",
    options: Mapping[str, Json] | None = None,
) -> TrainOutput:
    """forward_backward of the policy, which must succeed."""
    request = TrainRequest(
        trainee="policy", data=tuple(batch), loss=loss, loss_options=options or {}
    )
    [output] = await trainer.forward_backward([request])
    assert output.error == ""
    return output


async def step(trainer: Trainer, rate: float, **values: float) -> Mapping[str, float]:
    """optim_step of the policy, which must succeed."""
    [output] = await trainer.optim_step([OptimStep(trainee="policy", learning_rate=rate, **values)])
    assert output.error == ""
    return output.metrics


async def gradients_of(trainer: LoraTrainer, batch: Sequence[Datum]) -> list[torch.Tensor]:
    """All gradients that the policy has after this batch."""
    await train(trainer, batch)
    gradients = trainer.trainee("policy").gradients
    assert gradients is not None
    return [gradient.clone() for gradient in gradients]
