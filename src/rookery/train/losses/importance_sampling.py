"""Importance sampling: the policy gradient of tokens that other weights have drawn."""

from typing import ClassVar, Literal

import torch

from rookery.config import Config
from rookery.train.losses.loss import Column, LossOutput, Targets

__all__ = ["ImportanceSampling"]


class ImportanceSampling(Config):
    """The sum of -weight * ratio * advantage, where ratio = p / p when it was drawn.

    Drawn with p 0.25, now 0.5, advantage 3, weight 1: loss -6. `train/ratio` is the mean ratio; at
    the weights that drew the tokens it is 1.
    """

    type: Literal["importance_sampling"] = "importance_sampling"
    needs: ClassVar[tuple[Column, ...]] = ("sampled_logprobs", "advantages")

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        log_ratio = logprobs - targets.sampled_logprobs
        # Where there is no weight exp may be infinite, and 0 times that is NaN.
        ratio = torch.exp(torch.where(targets.weights != 0, log_ratio, 0.0))
        loss = -(targets.weights * ratio * targets.advantages).sum()
        sums = {"loss": loss.detach(), "ratio": (targets.weights * ratio).sum().detach()}
        return LossOutput(loss=loss, sums=sums)
