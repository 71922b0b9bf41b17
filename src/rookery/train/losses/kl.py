"""The KL divergence from a reference, estimated from the drawn tokens."""

from typing import Literal

import torch
from pydantic import Field

from rookery.config import Config

__all__ = ["KlConfig"]


class KlConfig(Config):
    """Adds weight * estimate to the loss of every token; d = log p - log p under the reference.

    k1 = d. Unbiased; its gradient is 0 in expectation, so that it is for watching, not for holding.
    k2 = d^2 / 2. Biased; its gradient is that of the KL divergence.
    k3 = exp(-d) + d - 1. Unbiased and never negative; what GRPO and TRL add.
    d = 0.5: 0.5, 0.125, 0.107.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimate."""
    weight: float = Field(default=0.04, ge=0.0)
    """TRL's beta."""

    def __call__(self, difference: torch.Tensor) -> torch.Tensor:
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference.square() / 2
        return torch.exp(-difference) + difference - 1
