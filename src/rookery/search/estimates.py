"""Scores of candidates that saw different numbers of the same tasks.

    paired_estimates([[1, 0, 1, 0], [0, 0]], leader=0, is_dropped=[False, True]) == [0.5, 0.0]

The leader has 0.5 on all four tasks and on the two that the other saw, where that one is 0.5 below.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["paired_estimates"]

Scores = Sequence[float] | NDArray[np.float64]


def paired_estimates(
    scores: Sequence[Scores], *, leader: int | None, is_dropped: Sequence[bool]
) -> list[float | None]:
    """Each candidate's score on all tasks asked so far; None for those that saw none.

    A dropped one saw a prefix only: its estimate is the leader's mean on everything plus their mean
    difference on that prefix, so that easy or hard tasks at the start cancel out.
    """
    best = [] if leader is None else [float(score) for score in scores[leader]]
    if not best:
        return [None] * len(scores)
    prefix = {count: _mean(best[:count]) for count in {len(row) for row in scores} if count}
    estimates: list[float | None] = []
    for row, is_out in zip(scores, is_dropped, strict=True):
        mean = _mean(row) if len(row) else None
        estimates.append(
            mean if mean is None or not is_out else _mean(best) + mean - prefix[len(row)]
        )
    return estimates


def _mean(scores: Scores) -> float:
    return math.fsum(scores) / len(scores)
