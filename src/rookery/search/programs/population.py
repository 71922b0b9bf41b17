"""The kept programs: on islands with feature grids, in the archive, in the front.

    population = ProgramPopulation(ProgramPopulationConfig(), state=None)
    population.add(member)
    population.best, population.islands[2].ranking.best(3)

Adding a program costs the same however many there are. If it moves a bound of the feature space,
all cell holders are placed anew; the grid bounds their number.

The model sees a parent, inspirations and the best programs of an island. Draws follow OpenEvolve: a
parent is any member (exploration), an elite (exploitation), or a member drawn by score.
Inspirations are the island's best, programs of cells near the parent's, then others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.programs.island import (
    FeatureSpace,
    Front,
    Island,
    IslandState,
    Ranking,
    cell_key,
)
from rookery.search.programs.program import Member

__all__ = [
    "Elites",
    "ParentSamplingConfig",
    "Plan",
    "PopulationState",
    "ProgramPopulation",
    "ProgramPopulationConfig",
    "draw_inspirations",
    "draw_parent",
]


class ProgramPopulationConfig(Config):
    """Which programs are kept, and where."""

    population_size: int = Field(default=1000, ge=1)
    """Most programs kept. The worst without a cell are removed first, then the worst with one; the
    best of each island and the newest stay."""
    archive_size: int = Field(default=100, ge=1)
    """Most programs in the archive and in the front."""
    num_islands: int = Field(default=5, ge=1)
    """Groups that evolve separately; attempt k works on island (k - 1) modulo this."""
    feature_dimensions: tuple[str, ...] = Field(default=("complexity", "diversity"), min_length=1)
    """Dimensions of the grid: `complexity`, `diversity`, `score` or the name of a metric."""
    feature_bins: int | dict[str, int] = 10
    """Bins of every dimension, or by dimension. A single number is raised until the grid has at
    least `archive_size` cells, as in OpenEvolve."""
    migration_interval: int = Field(default=50, ge=1)
    """Children of the busiest island between migrations."""
    migration_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of an island's programs, the best ones, that migrate to both neighbours."""
    objectives: tuple[str, ...] = ()
    """Metrics of a Pareto front, bigger is better; elite parents are then drawn from the front."""

    @model_validator(mode="after")
    def _check_features(self) -> "ProgramPopulationConfig":
        names = list(self.feature_dimensions)
        if len(set(names)) != len(names):
            raise ValueError(f"feature_dimensions {names} name one dimension twice.")
        if min(self.bins) < 1:
            raise ValueError(f"feature_bins is {self.feature_bins}; bins are 1 or above.")
        return self

    @property
    def bins(self) -> tuple[int, ...]:
        """Bins in the order of `feature_dimensions`; 10 if a dict lacks the dimension."""
        names = self.feature_dimensions
        if isinstance(self.feature_bins, dict):
            return tuple(self.feature_bins.get(name, 10) for name in names)
        least = int(self.archive_size ** (1 / len(names)) + 0.99)
        return (max(self.feature_bins, least),) * len(names) if self.feature_bins > 0 else (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationState:
    """A population as a value."""

    members: tuple[Member, ...] = ()
    """In the order of `add`."""
    islands: tuple[IslandState, ...] = ()
    archive: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    last_migration: int = 0
    """Children of the busiest island at the last migration."""


class ProgramPopulation:
    """Programs by id, with the indexes that search needs."""

    def __init__(self, config: ProgramPopulationConfig, *, state: PopulationState | None) -> None:
        empty = tuple(IslandState(cells={}) for _ in range(config.num_islands))
        state = state or PopulationState(islands=empty)
        if len(state.islands) != config.num_islands:
            raise ValueError(
                f"The state has {len(state.islands)} islands and the config {config.num_islands}."
            )
        self._config = config
        self._last_migration = state.last_migration
        self._members = {member.id: member for member in state.members}
        self.islands = tuple(Island(one, members=self._members) for one in state.islands)
        self.archive = Ranking(self._members[id] for id in state.archive)
        self.front = Front(
            size=config.archive_size,
            members={id: self._objectives(self._members[id]) for id in state.front},
        )
        self.space = FeatureSpace(config.feature_dimensions, bins=config.bins, bounds=state.bounds)
        self._elites = Ranking(one for one in self._members.values() if self._is_elite(one.id))
        self._others = Ranking(one for one in self._members.values() if one not in self._elites)

    @property
    def state(self) -> PopulationState:
        """A copy, independent of later changes."""
        return PopulationState(
            members=tuple(self._members.values()),
            islands=tuple(island.state for island in self.islands),
            archive=tuple(self.archive),
            front=self.front.ids,
            bounds=self.space.bounds,
            last_migration=self._last_migration,
        )

    @property
    def members(self) -> Mapping[str, Member]:
        return self._members

    @property
    def best(self) -> Member | None:
        """The program of the highest score, the earliest of equals."""
        bests = [self._members[island.ranking[0]] for island in self.islands if len(island)]
        return min(bests, key=lambda member: member.rank, default=None)

    def add(self, member: Member) -> None:
        """Add a new program, make room for it, and migrate if it is time."""
        if self.space.widen(member.features):
            self._move_cells()
        self._members[member.id] = member
        island = self.islands[member.record.island]
        self._place(member, island, is_migrant=False)
        self._add_to_archive(member)
        self._add_to_front(member)
        self._make_room(member)
        if member.record.parent is not None:
            island.num_children += 1
            self._migrate_if_due()

    def _place(self, member: Member, island: Island, *, is_migrant: bool) -> None:
        """Join the island, and take the cell if it is free or its holder scores lower. A holder
        that lost its cell to a better program leaves the island."""
        cell = self.space.cell(member.features)
        holder = island.grid.holder(cell)
        island.add(member, is_migrant=is_migrant)
        if holder is None:
            island.grid.put(cell, member.id)
        elif member.score > self._members[holder].score:
            island.grid.put(cell, member.id)
            island.remove(self._members[holder])
            self._settle(self._members[holder])
        self._rank(member)

    def _settle(self, member: Member) -> None:
        """Forget a program that is on no island and not in the front, else update its rank."""
        if member.id in self.front or any(member.id in island for island in self.islands):
            self._rank(member)
            return
        for ranking in (self.archive, self._elites, self._others):
            ranking.discard(member)
        del self._members[member.id]

    def _is_elite(self, id: str) -> bool:
        return id in self.front or any(id in island.grid for island in self.islands)

    def _rank(self, member: Member) -> None:
        """Sort the program into those with or without a cell."""
        self._elites.discard(member)
        self._others.discard(member)
        (self._elites if self._is_elite(member.id) else self._others).add(member)

    def _move_cells(self) -> None:
        """Place all cell holders anew after a bound moved."""
        for island in self.islands:
            holders = sorted((self._members[id] for id in island.grid), key=lambda one: one.rank)
            cells = [(one.id, self.space.cell(one.features)) for one in holders]
            for loser in island.grid.replace_all(cells):
                self._rank(self._members[loser])

    def _add_to_archive(self, member: Member) -> None:
        if member in self.archive:
            return
        if len(self.archive) >= self._config.archive_size:
            worst = self._members[self.archive[-1]]
            if member.score <= worst.score:
                return
            self.archive.discard(worst)
        self.archive.add(member)

    def _objectives(self, member: Member) -> tuple[float, ...]:
        return tuple(member.record.metrics[name] for name in self._config.objectives)

    def _add_to_front(self, member: Member) -> None:
        if not self._config.objectives:
            return
        change = self.front.add(member.id, self._objectives(member))
        for id in change.removed:
            self._settle(self._members[id])
        self._rank(member)

    def _make_room(self, newest: Member) -> None:
        while len(self._members) > self._config.population_size:
            # The best of all is also the best of an island.
            kept = {newest.id, *(island.best for island in self.islands)}
            worst = next(
                (
                    id
                    for ranking in (self._others, self._elites)
                    for id in reversed(ranking)
                    if id not in kept
                ),
                None,
            )
            if worst is None:
                return
            self._evict(self._members[worst])

    def _evict(self, member: Member) -> None:
        for island in self.islands:
            if member.id in island:
                island.remove(member)
        self.front.discard(member.id)
        self._settle(member)

    def _migrate_if_due(self) -> None:
        """Copy the best of every island to both neighbours.

        All are chosen before the first one moves. Migrants do not move on, and no program moves to
        an island that has its exact text already.
        """
        num_children = max(island.num_children for island in self.islands)
        is_due = num_children - self._last_migration >= self._config.migration_interval
        if len(self.islands) < 2 or not is_due:
            return
        self._last_migration = num_children
        for id, target in self._migrations():
            member, island = self._members.get(id), self.islands[target]
            if member is not None and not island.has_code(member.record.code.digest):
                self._place(member, island, is_migrant=True)

    def _migrations(self) -> list[tuple[str, int]]:
        moves = []
        for number, island in enumerate(self.islands):
            count = max(1, int(len(island) * self._config.migration_rate))
            natives = (id for id in island.ranking if id not in island.migrants)
            targets = ((number + 1) % len(self.islands), (number - 1) % len(self.islands))
            moves += [(id, target) for id in islice(natives, count) for target in targets]
        return moves


REACH = 2
"""Largest difference per coordinate between a near cell and the parent's: OpenEvolve's number."""
NUM_DRAWS = 16
"""Random draws from the archive before a full scan; with 5 islands 1 in 35 gets there."""
TRIES = 3
"""Cells looked up per inspiration: OpenEvolve's number."""


class ParentSamplingConfig(Config):
    """How a parent and inspirations are drawn."""

    exploration_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of parents drawn uniformly from all members of the island."""
    exploitation_ratio: float = Field(default=0.7, ge=0, le=1)
    """Share of parents drawn from the archive, or the front if there is one; others go by score."""
    elite_selection_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the inspirations that are the island's best programs, at least one."""
    num_inspirations: int = Field(default=2, ge=0)
    """Programs shown beside the parent as inspirations."""
    num_top: int = Field(default=5, ge=0)
    """Best programs of the island that are shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The programs, by id, and settings of attempt `attempt`. The child goes to `island`."""

    attempt: int
    island: int
    parent: str
    parent_score: float
    generation: int
    """Generation of the child."""
    inspirations: tuple[str, ...]
    top: tuple[str, ...]
    """The island's best, best first."""
    arm: str
    """The model or adapter that writes the child; empty without arms."""
    operator: str = ""
    """Operator that makes the child, one of `bandit.OPERATORS`; empty if none was drawn."""
    mends: str = ""
    """The failed program to repair; `parent` is then its parent."""
    failures: tuple[str, ...] = ()
    """Recurring failures, each as a sentence for the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elites:
    """Sources of exploitation draws, for all islands."""

    archive: Ranking
    front: Front
    """Empty without objectives."""

    def draw(self, rng: np.random.Generator, *, island: Island) -> str:
        """Draw an elite of the island, or any elite if it has none."""
        if len(self.front):
            return self.front.draw(rng, among=island)
        # A few draws usually hit the island; a full scan is the exception.
        for place in rng.integers(len(self.archive), size=NUM_DRAWS).tolist():
            if self.archive[place] in island:
                return self.archive[place]
        ids = [id for id in self.archive if id in island] or list(self.archive)
        return ids[int(rng.integers(len(ids)))]


def draw_parent(
    island: Island, *, elites: Elites, config: ParentSamplingConfig, rng: np.random.Generator
) -> str:
    """Draw a parent for a child on the island; from elsewhere while the island is empty."""
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
    config: ParentSamplingConfig,
    rng: np.random.Generator,
) -> tuple[str, ...]:
    """Draw up to `num_inspirations` distinct members of the island, without the parent."""
    count = config.num_inspirations
    if not count or not len(island):
        return ()
    num_best = max(1, int(count * config.elite_selection_ratio))
    # A dict keeps the order and drops duplicates.
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
