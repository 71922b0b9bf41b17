"""GRPO: the clipped objective, averaged over the tokens of each sequence, then over sequences."""

from typing import Literal

from rookery.train.averaging import Average
from rookery.train.losses.clipped import ClippedLoss

__all__ = ["Grpo"]


class Grpo(ClippedLoss):
    """Shao et al. 2024. Every sequence counts alike, however long it is."""

    type: Literal["grpo"] = "grpo"
    average: Average = "sequence"
