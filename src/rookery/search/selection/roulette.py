"""Roulette: a candidate is picked in proportion to its score.

Scores of 0 and above are used as they are. When one is negative, all are shifted so that the
worst has weight 0. All-zero and all-equal scores are equal weights.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rookery.config import Config
from rookery.search.selection.draw import draw

__all__ = ["RouletteConfig", "roulette", "shares"]


class RouletteConfig(Config):
    """Fitness-proportional selection."""

    type: Literal["roulette"] = "roulette"


def roulette(
    config: RouletteConfig,  # noqa: ARG001  the rules share one signature
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """Indices drawn with the probabilities of `shares`."""
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    return draw(shares(scores), count=count, distinct=distinct, order=order, rng=rng)


def shares(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights that sum to 1: (1, 3) gives (1/4, 3/4), (-2, 0, 2) gives (0, 1/3, 2/3)."""
    largest = np.abs(scores).max()
    scaled = scores / largest if largest > 0 else np.zeros_like(scores)
    shifted: NDArray[np.float64] = scaled - min(0.0, float(scaled.min()))
    if not shifted.any():
        shifted = np.ones_like(scores)
    shifted /= shifted.sum()
    return shifted
