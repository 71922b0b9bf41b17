"""Selection rules: who is picked, from scores alone. One file per rule, one dict.

    select(TournamentConfig(size=3), scores, count=2, distinct=True, rng=stream(seed, "parents"))

A score of None is a failed candidate: it is picked only when every candidate failed, and then
all are equal. Scores may be negative, all equal or all zero. With `distinct` each candidate is
picked at most once, so fewer than `count` come back when fewer are left to pick.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from rookery.search.selection.elites import elites
from rookery.search.selection.rank import RankConfig, rank
from rookery.search.selection.roulette import RouletteConfig, roulette, shares
from rookery.search.selection.tournament import TournamentConfig, tournament
from rookery.search.selection.truncation import TruncationConfig, truncation

__all__ = [
    "RULES",
    "RankConfig",
    "RouletteConfig",
    "SelectionConfig",
    "TournamentConfig",
    "TruncationConfig",
    "elites",
    "select",
    "shares",
]

SelectionConfig = Annotated[
    TournamentConfig | RouletteConfig | RankConfig | TruncationConfig, Field(discriminator="type")
]

RULES: Mapping[str, Callable[..., list[int]]] = {
    "rank": rank,
    "roulette": roulette,
    "tournament": tournament,
    "truncation": truncation,
}
"""Each is called as rule(config, scores, count=..., distinct=..., rng=...) with finite scores."""


def select(
    config: SelectionConfig,
    scores: Sequence[float | None],
    *,
    count: int,
    rng: np.random.Generator,
    distinct: bool = False,
) -> tuple[int, ...]:
    """Indices of the picked candidates, in the order they were picked."""
    if count < 0 or (count > 0 and not scores):
        raise ValueError(f"Got count {count} of {len(scores)} candidates: there is no such pick.")
    if count == 0:
        return ()
    alive = [index for index, score in enumerate(scores) if score is not None]
    pool = alive or list(range(len(scores)))
    values = np.array([scores[index] if alive else 0.0 for index in pool], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"Got scores {values}: they are finite, or None for a failed candidate.")
    wanted = min(count, len(pool)) if distinct else count
    picked = RULES[config.type](config, values, count=wanted, distinct=distinct, rng=rng)
    return tuple(pool[index] for index in picked)
