"""GSPO: one clipped ratio per sequence, the geometric mean of its tokens' ratios."""

from typing import Literal

import torch
from pydantic import Field

from rookery.train.averaging import Average
from rookery.train.losses.clipped import ClippedLoss
from rookery.train.losses.policy import Terms
from rookery.train.losses.sequences import sequence_means

__all__ = ["Gspo"]


class Gspo(ClippedLoss):
    """Zheng et al. 2025. Token ratios 2 and 0.5: the sequence's is 1. Its clips are as small as
    such means are."""

    type: Literal["gspo"] = "gspo"
    average: Average = "sequence"
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """How far a ratio counts below 1."""
    clip_high: float = Field(default=4e-4, ge=0.0)
    """How far a ratio counts above 1."""

    def log_ratio(self, terms: Terms) -> torch.Tensor:
        return sequence_means(terms.log_ratio, terms.datum, is_learned=terms.is_learned)
