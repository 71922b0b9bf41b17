"""Cross-entropy: the sum of -weight * log p, what supervised training minimises."""

from typing import ClassVar, Literal

import torch

from rookery.config import Config
from rookery.train.losses.loss import Column, LossOutput, Targets
from rookery.types import Datum

__all__ = ["CrossEntropy"]


class CrossEntropy(Config):
    """Log-probabilities (-0.5, -1, -1.5) and weights (0.5, 1, 1): loss 2.75, reported as 1.1."""

    type: Literal["cross_entropy"] = "cross_entropy"
    needs: ClassVar[tuple[Column, ...]] = ()

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        loss = -(targets.weights * logprobs).sum()
        return LossOutput(loss=loss, sums={"loss": loss.detach()})
