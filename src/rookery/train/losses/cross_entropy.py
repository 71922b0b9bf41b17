"""Cross-entropy: the sum of -weight * log p, what supervised training minimises."""

import torch

from rookery.train.losses.loss import LossOutput, Targets

__all__ = ["cross_entropy"]


def cross_entropy(logprobs: torch.Tensor, targets: Targets) -> LossOutput:
    """Log-probabilities (-0.5, -1, -1.5) and weights (0.5, 1, 1): loss 2.75, reported as 1.1."""
    loss = -(targets.weights * logprobs).sum()
    return LossOutput(loss=loss, sums={"loss": loss.detach()})
