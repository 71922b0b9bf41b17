"""What every loss takes and gives: a pure function of log-probabilities, one call per pass.

    def my_loss(logprobs: torch.Tensor, targets: Targets) -> LossOutput: ...

A loss is a plain sum over tokens: sums of passes, of batches and of tenants add up to the sum over
all their data, in any grouping. Who wants a mean divides the weights beforehand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Loss", "LossOutput", "Targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What belongs to each predicted token, in the order of the log-probabilities, T of them."""

    weights: torch.Tensor
    """[T], never 0: tokens without weight are not predicted."""
    datum: torch.Tensor
    """[T] which datum of the pass a token is of; a datum is never cut in two."""
    sampled: torch.Tensor | None
    """[T] `Datum.logprobs`, log-probabilities when the tokens were sampled; None: the data have
    none."""
    advantages: torch.Tensor | None
    """[T] `Datum.advantages`; None: the data have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss makes of one pass."""

    loss: torch.Tensor
    """Scalar, the sum that is differentiated."""
    sums: Mapping[str, torch.Tensor]
    """Detached scalars, reported as `train/<key>` per unit of weight over all passes of a batch.

    Passes of sums 6 and 2 and weights 3 and 1 report 2."""


Loss = Callable[[torch.Tensor, Targets], LossOutput]
