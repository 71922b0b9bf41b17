"""Linear ranking: only the order of the scores counts, the best candidate has most weight.

With pressure s and n candidates, weight = (2 - s) + 2 (s - 1) position / (n - 1), where the worst
is at position 0: n = 3, s = 1.5 gives 0.5, 1.0, 1.5 from worst to best.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rookery.config import Config
from rookery.search.ranks import tied_ranks
from rookery.search.selection.draw import draw

__all__ = ["RankConfig", "rank"]


class RankConfig(Config):
    """Selection by linear ranking."""

    type: Literal["rank"] = "rank"
    pressure: float = Field(default=1.8, ge=1.0, le=2.0)
    """How often the best is picked, relative to the average: 1 is no pressure; at 2 the worst is
    never picked."""


def rank(
    config: RankConfig,
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """Indices drawn by rank weight; candidates with equal scores have equal weights."""
    position = tied_ranks(scores) / max(1, len(scores) - 1)
    weights = (2.0 - config.pressure) + 2.0 * (config.pressure - 1.0) * position
    if len(scores) == 1:
        weights = np.ones(1)
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    return draw(weights, count=count, distinct=distinct, order=order, rng=rng)
