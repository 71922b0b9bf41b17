"""DRO: REINFORCE with a quadratic term that holds log-probabilities near those when drawn."""

from typing import Literal

import torch
from pydantic import Field

from rookery.train.losses.policy import Objective, PolicyLoss, Terms
from rookery.types import Datum

__all__ = ["Dro"]


class Dro(PolicyLoss):
    """A * log p - beta / 2 * (log p - log p when drawn)^2. Richemond et al. 2024, without a value
    network: whoever has one gives its advantages.

    log p -1, when drawn -2, advantage 3, beta 0.5: loss 3.25.
    """

    type: Literal["dro"] = "dro"
    ratio_to: Literal["sampled", "old"] = "sampled"
    """Which log-probabilities it is held to."""
    beta: float = Field(default=0.05, ge=0.0)
    """How strongly."""

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def objective(self, terms: Terms) -> Objective:
        values = terms.advantages * terms.logprobs - self.beta / 2 * terms.log_ratio.square()
        return Objective(values=values, ratio=torch.exp(terms.log_ratio))
