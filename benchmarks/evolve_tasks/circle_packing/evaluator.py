"""Scores 26 circles in the unit square by the sum of their radii, checked with zero tolerance.

The check computes with exact rationals: any overlap of two circles makes the packing invalid.
"""

import json
import math
import runpy
from collections.abc import Iterable
from fractions import Fraction

from openevolve.evaluation_result import EvaluationResult

NUM_CIRCLES = 26
BEST_KNOWN = 2.635
"""About the best known sum of radii, which scores 1."""

Circle = tuple[float, float, float]


def find_violation(circles: list[Circle], *, count: int = NUM_CIRCLES) -> str:
    """Describe the first violation of a packing; empty if it is valid."""
    if len(circles) != count:
        return f"there are {len(circles)} circles, not {count}"
    if not all(math.isfinite(number) for circle in circles for number in circle):
        return "a number is not finite"
    exact = [tuple(map(Fraction, circle)) for circle in circles]
    for i, (x, y, r) in enumerate(exact):
        if r <= 0:
            return f"circle {i} has the radius {float(r)}"
        if min(x, y, 1 - x, 1 - y) < r:
            return f"circle {i} leaves the square"
        for j, (x2, y2, r2) in enumerate(exact[:i]):
            if (x - x2) ** 2 + (y - y2) ** 2 < (r + r2) ** 2:
                return f"circles {j} and {i} overlap"
    return ""


def read_circles(rows: Iterable[Iterable[float]]) -> list[Circle]:
    """Convert rows to circles of floats."""
    circles = []
    for row in rows:
        x, y, r = row
        circles.append((float(x), float(y), float(r)))
    return circles


def evaluate(program_path: str) -> EvaluationResult:
    circles = read_circles(runpy.run_path(program_path)["pack"]())
    violation = find_violation(circles)
    if violation:
        raise ValueError(violation)
    total = sum(r for _, _, r in circles)
    metrics = {"combined_score": total / BEST_KNOWN, "sum_of_radii": total}
    return EvaluationResult(metrics=metrics, artifacts={"circles": json.dumps(circles)})
