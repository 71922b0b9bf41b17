"""How the tokens of a step are averaged: weights divided once, for all calls of the step.

    calls = averaged([data[:64], data[64:]], "sequence")
    for data in calls:
        await trainer.forward_backward([TrainRequest(..., data=data)])
    await trainer.optim_step(...)

Losses are sums and gradients add up, so that what is divided here is the same in one call and in
many, except where `call` asks for another.

Answers of 2 and 6 tokens, all of weight 1, in one call; at most 10 tokens are drawn:

    sequence   1/4 and 1/12    every sequence counts alike
    token      1/8 and 1/8     every token counts alike
    constant   1/20 and 1/20   every token counts alike, and as much in a step of short answers
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Literal

from rookery.errors import TrainError
from rookery.types import Datum

__all__ = [
    "Average",
    "averaged",
    "merged_metrics",
]

Average = Literal["sequence", "token", "call", "constant"]
"""`sequence`: over the tokens of each sequence, then over sequences. `token`: over all tokens of a
step. `call`: over the tokens of each call, then over calls. `constant`: the sum over tokens by the
number of sequences times the most tokens that are drawn."""


def averaged(
    calls: Sequence[Sequence[Datum]], average: Average, *, max_tokens: int | None = None
) -> list[tuple[Datum, ...]]:
    """All data of one step, call by call, with weights that make the sum of losses the average.

    Weights are 1 for what was drawn and 0 for what was not, or any shares of 0 or more. Data
    without any weight count as sequences.
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
    """Sums and counts add up, maxima are the largest, all else is a mean by weight.

    Losses 2 and 4 of weights 3 and 1: 2.5. What some calls do not report is of those that do.
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
