"""What one process computes of a request, and the output that the parts of all make together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from rookery.types import TrainOutput

__all__ = ["Part", "join_parts"]


@dataclass(slots=True)
class Part:
    """Sums over some of the data; with an error nothing else counts."""

    error: str = ""
    num_data: int = 0
    """Of the whole request."""
    logprobs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """By the place of the datum in the request."""
    sums: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    maxima: dict[str, float] = field(default_factory=dict)
    loss_sum: float = 0.0
    weight: float = 0.0
    num_tokens: int = 0
    """Targets with a weight."""


def join_parts(parts: Sequence[Part]) -> TrainOutput:
    """The first error, or the output of all data."""
    error = next((part.error for part in parts if part.error), "")
    if error:
        return TrainOutput(error=error)
    logprobs = {place: own for part in parts for place, own in part.logprobs.items()}
    sums: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    maxima: dict[str, float] = {}
    for part in parts:
        sums.update(part.sums)
        totals.update(part.totals)
        for key, value in part.maxima.items():
            maxima[key] = max(maxima.get(key, -inf), value)
    weight = sum(part.weight for part in parts)
    # Without weight, or with weights that cancel, there is no mean to report.
    means = {f"train/{key}": value / weight for key, value in sums.items() if weight}
    num_data = parts[0].num_data
    own = {k: v / num_data if k.endswith(":mean") else v for k, v in totals.items()}
    largest = {f"train/{key}_max": value for key, value in maxima.items()}
    counts = {
        "train/loss_sum": sum(part.loss_sum for part in parts),
        "train/weight_sum": weight,
        "train/num_tokens": float(sum(part.num_tokens for part in parts)),
    }
    return TrainOutput(
        metrics={**means, **largest, **counts, **own},
        logprobs=tuple(logprobs.get(place, ()) for place in range(num_data)),
    )
