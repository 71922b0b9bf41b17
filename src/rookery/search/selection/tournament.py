"""Tournament: draw `size` candidates at random, the best of them is picked; repeat.

Among equals the one drawn first wins, so ties are broken by chance and not by age.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rookery.config import Config

__all__ = ["TournamentConfig", "tournament"]


class TournamentConfig(Config):
    """Selection by tournaments."""

    type: Literal["tournament"] = "tournament"
    size: int = Field(default=2, ge=1)
    """Candidates per tournament: 1 is no pressure, more press harder."""
    replacement: bool = True
    """Whether one candidate may be drawn twice into the same tournament. Without, the worst
    `size` - 1 candidates never win, and a tournament larger than the pool picks the best."""


def tournament(
    config: TournamentConfig,
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """The winners of `count` tournaments; with `distinct` a winner does not play again."""
    pool = list(range(len(scores)))
    picked: list[int] = []
    for _ in range(count):
        if config.replacement:
            drawn = rng.integers(len(pool), size=config.size)
        else:
            drawn = rng.permutation(len(pool))[: config.size]
        players = [pool[int(index)] for index in drawn]
        winner = max(players, key=lambda index: scores[index])
        picked.append(winner)
        if distinct:
            pool.remove(winner)
    return picked
