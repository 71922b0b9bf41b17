"""Dr. GRPO: the clipped objective, summed over tokens and divided by a constant."""

from typing import Literal

from rookery.train.averaging import Average
from rookery.train.losses.clipped import ClippedLoss

__all__ = ["DrGrpo"]


class DrGrpo(ClippedLoss):
    """Liu et al. 2025. Long wrong answers are not excused by their length; its advantages are not
    divided by the standard deviation of their group."""

    type: Literal["dr_grpo"] = "dr_grpo"
    average: Average = "constant"
