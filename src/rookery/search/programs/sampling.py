"""Who is shown to the model: a parent, inspirations and the best programs of an island.

Draws follow OpenEvolve: a parent is any member (exploration), an elite (exploitation), or a member
by its score; inspirations are the island's best, programs of cells near the parent's, then others.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from rookery.config import Config
from rookery.search.programs.island import FeatureSpace, Island, cell_key
from rookery.search.programs.program import Member
from rookery.search.programs.ranking import Front, Ranking

__all__ = ["Elites", "Plan", "SamplingConfig", "draw_inspirations", "draw_parent"]

REACH = 2
"""A cell is near the parent's if no coordinate differs by more: OpenEvolve's number."""
NUM_DRAWS = 16
"""Draws from the archive before all of it is looked at; with 5 islands 1 in 35 gets there."""
TRIES = 3
"""Cells that are looked up for one place among the inspirations: OpenEvolve's number."""


class SamplingConfig(Config):
    """How a parent and inspirations are drawn."""

    exploration_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of parents drawn from all members of the island alike."""
    exploitation_ratio: float = Field(default=0.7, ge=0, le=1)
    """Share of parents drawn from the archive, or from the front when there are objectives; the
    rest are drawn by score."""
    elite_selection_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the inspirations that are the island's best programs; at least one is."""
    num_inspirations: int = Field(default=2, ge=0)
    """Programs shown beside the parent for their ideas."""
    num_top: int = Field(default=5, ge=0)
    """The best programs of the island, shown as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What attempt `attempt` works with, by id. The child goes to `island`."""

    attempt: int
    island: int
    parent: str
    parent_score: float
    generation: int
    """The child's."""
    inspirations: tuple[str, ...]
    top: tuple[str, ...]
    """The island's best, best first."""
    arm: str
    """The model or adapter that writes the child; empty when none was named."""
    operator: str = ""
    """How the child is made: one of `adaptive.OPERATORS`; empty where none was drawn."""
    mends: str = ""
    """The failed program that is to be mended; `parent` is then its parent."""
    failures: tuple[str, ...] = ()
    """Failures that recur, each as a sentence for the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elites:
    """Where exploitation draws from, for all islands."""

    archive: Ranking
    front: Front
    """Empty when there are no objectives."""

    def draw(self, rng: np.random.Generator, *, island: Island) -> str:
        """An elite of the island, or any when it has none."""
        if len(self.front):
            return self.front.draw(rng, among=island)
        # A few draws from all find one of the island; looking at all of them is the exception.
        for place in rng.integers(len(self.archive), size=NUM_DRAWS).tolist():
            if self.archive[place] in island:
                return self.archive[place]
        ids = [id for id in self.archive if id in island] or list(self.archive)
        return ids[int(rng.integers(len(ids)))]


def draw_parent(
    island: Island, *, elites: Elites, config: SamplingConfig, rng: np.random.Generator
) -> str:
    """A parent for a child on the island; from elsewhere while the island is empty."""
    share = rng.random()
    if len(island) and share < config.exploration_ratio:
        return island.draw(rng)
    if not len(island) or share < config.exploration_ratio + config.exploitation_ratio:
        return elites.draw(rng, island=island)
    return island.draw_by_score(rng)


def draw_inspirations(
    island: Island,
    *,
    parent: Member,
    space: FeatureSpace,
    config: SamplingConfig,
    rng: np.random.Generator,
) -> tuple[str, ...]:
    """Members of the island without the parent, none twice, at most `num_inspirations`."""
    count = config.num_inspirations
    if not count or not len(island):
        return ()
    num_best = max(1, int(count * config.elite_selection_ratio))
    # A dict keeps the order and drops who comes twice.
    drawn = dict.fromkeys(id for id in island.ranking.best(num_best) if id != parent.id)
    centre = space.coordinates(parent.features)
    shifts = rng.integers(-REACH, REACH + 1, size=(TRIES * count, len(centre))).tolist()
    for shift in shifts:
        near = space.clip([place + move for place, move in zip(centre, shift, strict=True)])
        holder = island.grid.holder(cell_key(near))
        if holder is not None and holder != parent.id and len(drawn) < count:
            drawn[holder] = None
    missing = count - len(drawn)
    if missing > 0:
        others = island.draw_others(missing, without={parent.id, *drawn}, rng=rng)
        drawn.update(dict.fromkeys(others))
    return tuple(drawn)[:count]
