"""CISPO: REINFORCE with a bounded ratio as weight, so that no token loses its gradient."""

from typing import Literal

import torch
from pydantic import Field

from rookery.train.losses.policy import Objective, PolicyLoss, Terms

__all__ = ["Cispo"]


class Cispo(PolicyLoss):
    """min(ratio, max_ratio) * A * log p, the ratio without gradient. MiniMax 2025."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0.0, allow_inf_nan=False)
    """Larger ratios count as this one; TRL's epsilon_high, which is the bound itself."""

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio.detach())
        values = ratio.clamp(max=self.max_ratio) * terms.advantages * terms.logprobs
        shares = {"clip_high": (ratio > self.max_ratio).float()}
        return Objective(values=values, ratio=ratio, shares=shares)
