"""BNPO as TRL has it: the clipped objective, averaged over the tokens of each call."""

from typing import Literal

from rookery.train.averaging import Average
from rookery.train.losses.clipped import ClippedLoss

__all__ = ["Bnpo"]


class Bnpo(ClippedLoss):
    """DAPO's average, by call: with several calls per step, tokens of short calls count more."""

    type: Literal["bnpo"] = "bnpo"
    average: Average = "call"
