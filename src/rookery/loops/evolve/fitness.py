"""One number out of the metrics of an evaluator, chosen as OpenEvolve chooses it."""

import math
from collections.abc import Collection
from contextlib import suppress

from rookery.loops.evolve.program import Metrics

__all__ = ["find_fitness", "is_number"]


def find_fitness(metrics: Metrics, *, feature_dimensions: Collection[str] = ()) -> float | None:
    """`combined_score`, else the mean of the numbers that are no feature dimension.

    If every number is a feature dimension, the mean of all. In a mean, flags (True, False) and NaN
    do not count. None where there is no number, or where combined_score is NaN.
    """
    if "combined_score" in metrics:
        with suppress(TypeError, ValueError):
            score = float(metrics["combined_score"])
            return None if math.isnan(score) else score
    numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
    scores = [value for name, value in numbers.items() if name not in feature_dimensions]
    scores = scores or list(numbers.values())
    return sum(scores) / len(scores) if scores else None


def is_number(value: object) -> bool:
    """Whether a metric is a number that can be compared: no flag, no text, not NaN."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and not math.isnan(value)  # type: ignore[arg-type]
