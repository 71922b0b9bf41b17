"""What every loss takes and gives: a pure function of log-probabilities, one call per pass.

    class MyLoss(Config):
        type: Literal["my_loss"] = "my_loss"
        needs: ClassVar[tuple[Column, ...]] = ("advantages",)

        def learns_from(self, datum: Datum) -> bool: ...
        def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput: ...

Its fields are its options. A loss is a plain sum over targets: sums of passes, of requests and of
trainees add up to the sum over all their data, in any grouping. Who wants a mean divides the
weights beforehand: `averaged` does it for all data of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch

from rookery.config import Config
from rookery.types import Datum, Json

__all__ = [
    "Column",
    "CrossEntropy",
    "Loss",
    "LossOutput",
    "Targets",
]

Column = Literal["sampled_logprobs", "old_logprobs", "reference_logprobs", "advantages"]
"""What a datum may have besides tokens, targets and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What belongs to each target, in the order of the log-probabilities, T of them."""

    weights: torch.Tensor
    """[T]"""
    datum: torch.Tensor
    """[T] which datum of the pass a target is of; a datum is never cut in two."""
    sampled_logprobs: torch.Tensor
    """[T] The columns of the data; empty when the data do not have it, see `Loss.needs`."""
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    num_rows: Sequence[int] = ()
    """Of each datum, how many positions its targets are at."""
    inputs: Sequence[Mapping[str, Json]] = ()
    """Of each datum, what else it brings for a loss of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss makes of one pass."""

    loss: torch.Tensor
    """Scalar, the sum that is differentiated."""
    sums: Mapping[str, torch.Tensor]
    """Detached scalars, reported as `train/<key>` per unit of weight over all passes of a request.

    Passes of sums 6 and 2 and weights 3 and 1 report 2."""
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached scalars, reported as `train/<key>_max`: the largest of all passes of a request."""
    totals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached scalars summed over data, reported by their own keys: those that end in `:mean`
    divided by the number of data."""


class Loss(Protocol):
    """A loss with its options chosen."""

    @property
    def needs(self) -> tuple[Column, ...]:
        """Columns that its data must have."""
        ...

    def learns_from(self, datum: Datum) -> bool:
        """Whether the datum can have a gradient; if not, its log-probabilities are all there is."""
        ...

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput: ...


# Cross-entropy: the sum of -weight * log p, what supervised training minimises.


class CrossEntropy(Config):
    """Log-probabilities (-0.5, -1, -1.5) and weights (0.5, 1, 1): loss 2.75, reported as 1.1."""

    type: Literal["cross_entropy"] = "cross_entropy"
    needs: ClassVar[tuple[Column, ...]] = ()

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        loss = -(targets.weights * logprobs).sum()
        return LossOutput(loss=loss, sums={"loss": loss.detach()})
