"""DAPO: the clipped objective with a wider upper clip, averaged over all tokens of a step."""

from typing import Literal

from pydantic import Field

from rookery.train.averaging import Average
from rookery.train.losses.clipped import ClippedLoss

__all__ = ["Dapo"]


class Dapo(ClippedLoss):
    """Yu et al. 2025. Every token counts alike; unlikely tokens have room to become likely."""

    type: Literal["dapo"] = "dapo"
    average: Average = "token"
    clip_high: float = Field(default=0.28, ge=0.0)
    """How far a ratio counts above 1."""
