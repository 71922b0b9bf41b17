"""A batch of drawn answers as tables, and as the data and targets that losses take.

Tables are [B, T] with a mask, as TRL and the papers have them; a loss takes the targets end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rookery.train.losses import Loss, Targets
from rookery.train.losses.loss import Average, averaged
from rookery.types import Datum

MAX_TOKENS = 9


@dataclass(frozen=True)
class DrawnBatch:
    """B answers of up to T tokens; what stands where the mask is 0 is not to be read."""

    mask: torch.Tensor
    current: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor

    def rows(self, which: slice) -> "DrawnBatch":
        return DrawnBatch(
            self.mask[which], self.current[which], self.old[which],
            self.sampled[which], self.reference[which], self.advantages[which],
        )  # fmt: skip


def draw_batch(*, seed: int = 0, num_rows: int = 7, spread: float = 0.5) -> DrawnBatch:
    """Ratios on both sides of every clip, advantages of both signs, a gap within an answer."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        shape = (num_rows, MAX_TOKENS)
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, MAX_TOKENS + 1, (num_rows,), generator=generator)
    lengths[0] = MAX_TOKENS
    mask = (torch.arange(MAX_TOKENS)[None] < lengths[:, None]).double()
    mask[0, 3:5] = 0.0
    old = -noise(1.0).abs() - 0.1
    return DrawnBatch(
        mask=mask,
        current=old + noise(spread),
        old=old,
        sampled=old + noise(spread / 2),
        reference=old + noise(spread),
        advantages=torch.randn(num_rows, generator=generator, dtype=torch.float64),
    )


def averaged_data(calls: Sequence[DrawnBatch], average: Average) -> list[tuple[Datum, ...]]:
    """The answers as data, their weights those of a step of these calls."""
    return averaged([_data(batch) for batch in calls], average, max_tokens=MAX_TOKENS)


def loss_and_gradient(
    loss: Loss, average: Average, calls: Sequence[DrawnBatch]
) -> tuple[float, torch.Tensor]:
    """The sum over calls, and its gradient by the log-probabilities, [all rows, T]."""
    total, gradients = 0.0, []
    for batch, data in zip(calls, averaged_data(calls, average), strict=True):
        current = batch.current.clone().requires_grad_()
        output = loss(current.flatten(), targets_of(data))
        [gradient] = torch.autograd.grad(output.loss, [current])
        total += output.loss.item()
        gradients.append(gradient)
    return total, torch.cat(gradients)


def targets_of(data: Sequence[Datum]) -> Targets:
    def column(name: str) -> torch.Tensor:
        rows = [getattr(datum, name) for datum in data]
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    datum = [index for index, row in enumerate(data) for _ in row.targets]
    names = ("weights", "sampled_logprobs", "old_logprobs", "reference_logprobs", "advantages")
    columns: Any = {name: column(name) for name in names}
    return Targets(datum=torch.tensor(datum), **columns)


def _data(batch: DrawnBatch) -> list[Datum]:
    num_tokens = batch.mask.shape[1]
    return [
        Datum(
            tokens=(5,) * num_tokens,
            positions=tuple(range(num_tokens)),
            targets=(5,) * num_tokens,
            weights=tuple(batch.mask[row].tolist()),
            sampled_logprobs=tuple(batch.sampled[row].tolist()),
            old_logprobs=tuple(batch.old[row].tolist()),
            reference_logprobs=tuple(batch.reference[row].tolist()),
            advantages=(batch.advantages[row].item(),) * num_tokens,
        )
        for row in range(len(batch.mask))
    ]
