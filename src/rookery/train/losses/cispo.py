"""CISPO: REINFORCE with a bounded ratio as weight, so that no token loses its gradient."""

from typing import Literal

import torch
from pydantic import Field, model_validator

from rookery.train.losses.policy import Objective, PolicyLoss, Terms

__all__ = ["Cispo"]


class Cispo(PolicyLoss):
    """The ratio within bounds * A * log p, the ratio without gradient. MiniMax 2025."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0.0)
    """Larger ratios count as this one; TRL's epsilon_high, which is the bound itself."""

    min_ratio: float = Field(default=0.0, ge=0.0)
    """Smaller ratios count as this one."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Cispo":
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                f"min_ratio is {self.min_ratio:g} and max_ratio {self.max_ratio:g}; write a "
                "min_ratio that is not above"
            )
        return self

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio.detach())
        values = ratio.clamp(self.min_ratio, self.max_ratio) * terms.advantages * terms.logprobs
        shares = {"clip_high": (ratio > self.max_ratio).float()}
        if self.min_ratio:
            shares["clip_low"] = (ratio < self.min_ratio).float()
        return Objective(values=values, ratio=ratio, shares=shares)
