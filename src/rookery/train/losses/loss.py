"""The Loss protocol: a pure function of log-probabilities, called once per pass.

    class MyLoss(Config):
        type: Literal["my_loss"] = "my_loss"
        needs: ClassVar[tuple[Column, ...]] = ("advantages",)

        def learns_from(self, datum: Datum) -> bool: ...
        def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput: ...

Its fields are its options. A loss is a plain sum over targets, so sums of passes, requests and
trainees add up in any grouping. For a mean, divide the weights first: `averaged` does so for all
data of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import ClassVar, Literal, Protocol

import torch

from rookery.config import Config
from rookery.errors import TrainError
from rookery.types import Datum, Json

__all__ = [
    "Average",
    "Column",
    "CrossEntropy",
    "Loss",
    "LossOutput",
    "Targets",
    "averaged",
    "merged_metrics",
]


Column = Literal["sampled_logprobs", "old_logprobs", "reference_logprobs", "advantages"]
"""Optional columns of a datum, besides tokens, targets and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Values per target, in the order of the T log-probabilities."""

    weights: torch.Tensor
    """[T]"""
    datum: torch.Tensor
    """[T] Datum of each target, counted in the pass; a datum is never split over passes."""
    sampled_logprobs: torch.Tensor
    """[T] A column of the data, as are the next three; empty if they lack it, see `Loss.needs`."""
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    num_rows: Sequence[int] = ()
    """Per datum: the number of distinct positions of its targets."""
    inputs: Sequence[Mapping[str, Json]] = ()
    """Per datum: further inputs, for a custom loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss of one pass, with metrics."""

    loss: torch.Tensor
    """Scalar to differentiate."""
    sums: Mapping[str, torch.Tensor]
    """Detached scalars, reported as `train/<key>` per unit of weight over all passes of a request.
    Passes of sums 6 and 2 and weights 3 and 1 report 2."""
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached scalars; their maximum over a request's passes is reported as `train/<key>_max`."""
    totals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached scalars, summed over data and reported by their own keys. Keys that end in `:mean`
    are divided by the number of data."""


class Loss(Protocol):
    """A loss with its options chosen."""

    @property
    def needs(self) -> tuple[Column, ...]:
        """Columns that its data must have."""
        ...

    def learns_from(self, datum: Datum) -> bool:
        """Whether the datum can have a gradient; if not, only log-probabilities are computed."""
        ...

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput: ...


class CrossEntropy(Config):
    """Sum of -weight * log p: log p (-0.5, -1, -1.5) and weights (0.5, 1, 1) give 2.75."""

    type: Literal["cross_entropy"] = "cross_entropy"
    needs: ClassVar[tuple[Column, ...]] = ()

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        loss = -(targets.weights * logprobs).sum()
        return LossOutput(loss=loss, sums={"loss": loss.detach()})


# Averages over the tokens of a step: weights are divided once, for all calls of the step.
#
#     calls = averaged([data[:64], data[64:]], "sequence")
#     for data in calls:
#         await trainer.forward_backward([TrainRequest(..., data=data)])
#     await trainer.optim_step(...)
#
# Losses are sums and gradients add up, so one call or many give the same average, except with
# `call`.
#
# Answers of 2 and 6 tokens, all of weight 1, in one call; at most 10 tokens are drawn:
#
#     sequence   1/4 and 1/12    every sequence counts alike
#     token      1/8 and 1/8     every token counts alike
#     constant   1/20 and 1/20   every token counts alike, independent of the step's other answers


Average = Literal["sequence", "token", "call", "constant"]
"""`sequence`: over the tokens of each sequence, then over sequences. `token`: over all tokens of a
step. `call`: over the tokens of each call, then over calls. `constant`: the sum over tokens,
divided by the number of sequences times the most tokens per answer."""


def averaged(
    calls: Sequence[Sequence[Datum]], average: Average, *, max_tokens: int | None = None
) -> list[tuple[Datum, ...]]:
    """Return a step's data, call by call, with weights that make the sum of losses the average.

    Input weights are 1 for drawn tokens and 0 for others, or any share from 0 up. Data without
    weight still count as sequences.
    """
    if average == "constant" and (max_tokens is None or max_tokens < 1):
        raise TrainError(
            f"The average `constant` divides by the most tokens that are drawn, and max_tokens is "
            f"{max_tokens}: give 1 or more."
        )
    totals = [[_total(datum) for datum in data] for data in calls]
    num_data = sum(map(len, calls))
    all_tokens = fsum(total for data in totals for total in data)
    weighted = []
    for data, lengths in zip(calls, totals, strict=True):
        divisors = {
            "sequence": [num_data * length for length in lengths],
            "token": [all_tokens] * len(data),
            "call": [len(calls) * fsum(lengths)] * len(data),
            "constant": [num_data * float(max_tokens or 0)] * len(data),
        }[average]
        weighted.append(
            tuple(_divided(datum, by) for datum, by in zip(data, divisors, strict=True))
        )
    return weighted


def _total(datum: Datum) -> float:
    if any(weight < 0 for weight in datum.weights):
        raise TrainError(
            "A datum has negative weights; to average they are 0 or more: put the sign into its "
            "advantages."
        )
    return fsum(datum.weights)


def _divided(datum: Datum, divisor: float) -> Datum:
    if not divisor:
        return datum
    return replace(datum, weights=tuple(weight / divisor for weight in datum.weights))


_WEIGHT = "train/weight_sum"


def merged_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join reports: sums and counts add up, maxima take the largest, all else is a mean by weight.

    Losses 2 and 4 of weights 3 and 1: 2.5. A report without a key does not count towards its mean.
    """
    merged = {}
    for key in {key: None for report in reports for key in report}:
        having = [report for report in reports if key in report]
        values = [report[key] for report in having]
        if key.endswith("_sum") or key.startswith("train/num_"):
            merged[key] = sum(values)
        elif key.endswith("_max"):
            merged[key] = max(values)
        else:
            weights = [report[_WEIGHT] for report in having]
            pairs = zip(weights, values, strict=True)
            merged[key] = sum(weight * value for weight, value in pairs) / sum(weights)
    return merged
