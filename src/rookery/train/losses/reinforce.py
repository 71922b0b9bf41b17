"""REINFORCE: log-probabilities times advantages, no ratio."""

from typing import Literal

import torch

from rookery.train.losses.policy import Objective, PolicyLoss, Terms

__all__ = ["Reinforce"]


class Reinforce(PolicyLoss):
    """A * log p. Right for tokens drawn by the current weights; `correction` mends small gaps."""

    type: Literal["reinforce"] = "reinforce"
    ratio_to: Literal["current"] = "current"
    """There is no ratio."""

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.ones_like(terms.logprobs)
        return Objective(values=terms.advantages * terms.logprobs, ratio=ratio)
