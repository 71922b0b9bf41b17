"""Batches and trainers of the tiny model."""

from collections.abc import Sequence

import torch
from tiny import VOCAB, tiny_adapter

from rookery.slots import SlottedModel
from rookery.train import LoraTrainer, TrainerConfig
from rookery.types import Adapter, Datum

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
NO_CLIP = TrainerConfig(max_grad_norm=0.0)


def make_batch(lengths: Sequence[int] = (9, 4, 17, 2, 12), *, seed: int = 0) -> list[Datum]:
    """Random rows; the first half of each has no weight, the others have weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in lengths:
        tokens = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        weights = torch.rand(length, generator=generator).tolist()
        prompt = max(1, length // 2)
        batch.append(Datum(tokens=tuple(tokens), weights=tuple([0.0] * prompt + weights[prompt:])))
    return batch


def make_trainer(
    model: SlottedModel, start: Adapter | None = None, config: TrainerConfig = NO_CLIP
) -> LoraTrainer:
    return LoraTrainer(model, start or tiny_adapter("start", layers=range(2, 4)), config=config)


async def gradients_of(trainer: LoraTrainer, batch: Sequence[Datum]) -> list[torch.Tensor]:
    await trainer.forward_backward(batch, loss="cross_entropy")
    assert trainer._gradients is not None
    return [gradient.clone() for gradient in trainer._gradients]
