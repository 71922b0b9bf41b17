"""Truncation: the best share of the candidates, each with the same chance; the rest has none."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rookery.config import Config
from rookery.search.selection.draw import draw

__all__ = ["TruncationConfig", "truncation"]


class TruncationConfig(Config):
    """Selection by truncation."""

    type: Literal["truncation"] = "truncation"
    fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """The share that may be picked, rounded up: 0.5 of 5 candidates are the best 3."""


def truncation(
    config: TruncationConfig,
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """Indices drawn evenly from the best; distinct picks beyond them go on in order of score."""
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    kept = math.ceil(config.fraction * len(scores))
    weights = np.zeros(len(scores))
    weights[order[:kept]] = 1.0
    return draw(weights, count=count, distinct=distinct, order=order, rng=rng)
