"""Importance sampling: the policy gradient of tokens that other weights have drawn."""

from typing import Literal

import torch

from rookery.train.losses.policy import Objective, PolicyLoss, Terms

__all__ = ["ImportanceSampling"]


class ImportanceSampling(PolicyLoss):
    """ratio * A, without any clip.

    Drawn with p 0.25, now 0.5, advantage 3, weight 1: loss -6. `train/ratio` is the mean ratio; at
    the weights that drew the tokens it is 1.
    """

    type: Literal["importance_sampling"] = "importance_sampling"

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio)
        return Objective(values=ratio * terms.advantages, ratio=ratio)
