"""A quality-diversity grid (MAP-Elites): the best candidate of every cell of feature space.

    archive = Archive(config=ArchiveConfig(features=(FeatureConfig(name="length", high=400),)))
    archive, outcome = insert(archive, "g003-c07", score=0.61, features={"length": 123.0})
    parents = sample(archive, count=2, rng=stream(seed, "archive", generation))

It holds ids, not candidates: adapters and programs alike.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.fitness import Fitness
from rookery.search.selection import elites

__all__ = [
    "Archive",
    "ArchiveConfig",
    "Entry",
    "FeatureConfig",
    "Outcome",
    "cell_of",
    "crowded_scores",
    "crowding",
    "dominates",
    "extend",
    "fronts",
    "insert",
    "nsga2",
    "sample",
]

# Several objectives at once: fronts, crowding, NSGA-II, with constraints by domination.
#
#     fronts(fitnesses)            # [[0, 3], [1], [2]]: nobody in the first is dominated
#     nsga2(fitnesses, count=8)    # the survivors
#     crowded_scores(fitnesses)    # numbers any selection rule can use
#
# Constraint domination: a feasible candidate dominates an infeasible one; of two infeasible ones
# the smaller violation dominates; two feasible ones are compared by their objectives.


def dominates(a: Fitness, b: Fitness) -> bool:
    """Whether a is at least as good everywhere and better somewhere. Failed ones lose to all."""
    return len(fronts([a, b])) == 2 and fronts([a, b])[0] == [0]


def fronts(fitnesses: Sequence[Fitness]) -> list[list[int]]:
    """Indices by front, best front first; failed candidates are in the last front.

    Feasible candidates come first, by their objectives; then each violation is a front. O(n log n)
    for n candidates with two objectives; with more, each candidate is also compared with the
    members of a few fronts.
    """
    alive = [index for index, fitness in enumerate(fitnesses) if not fitness.is_failed]
    widths = {len(_vector(fitnesses[index])) for index in alive}
    if len(widths) > 1:
        raise ValueError(
            f"Got candidates with {sorted(widths)} objectives: all need the same ones."
        )
    feasible = [index for index in alive if fitnesses[index].violation == 0]
    found = [[feasible[place] for place in front] for front in _layers(fitnesses, feasible)]
    missing: dict[float, list[int]] = {}
    for index in alive:
        if fitnesses[index].violation > 0:
            missing.setdefault(fitnesses[index].violation, []).append(index)
    failed = [index for index, fitness in enumerate(fitnesses) if fitness.is_failed]
    by_violation = [missing[violation] for violation in sorted(missing)]
    return [*found, *by_violation, *([failed] if failed else [])]


def _layers(fitnesses: Sequence[Fitness], chosen: Sequence[int]) -> list[list[int]]:
    """Fronts of the chosen by their objectives alone, as places among them.

    In falling lexicographic order whoever dominates a candidate comes before it, and who is not
    dominated by a front is not by a later one either: its front is found by bisection.
    """
    if not chosen:
        return []
    values = np.array([_vector(fitnesses[index]) for index in chosen], dtype=np.float64)
    order = np.lexsort(-values.T[::-1]).tolist()
    find = _find_by_last(values) if values.shape[1] <= 2 else _find_by_all(values)
    layers: list[list[int]] = []
    for place in order:
        depth = find(place, layers)
        if depth == len(layers):
            layers.append([])
        layers[depth].append(place)
    return [sorted(layer) for layer in layers]


Find = Callable[[int, list[list[int]]], int]
"""The first of the fronts, none of whose members dominates the candidate at this place."""


def _find_by_last(values: NDArray[np.float64]) -> Find:
    """With one or two objectives only the last of a front matters: none of it is better in the
    second, and all of it is at least as good as the candidate in the first."""
    keys = [(-row[-1], -row[0]) for row in values.tolist()]
    return lambda place, layers: bisect_left(layers, keys[place], key=lambda layer: keys[layer[-1]])


def _find_by_all(values: NDArray[np.float64]) -> Find:
    def find(place: int, layers: list[list[int]]) -> int:
        def is_free(layer: list[int]) -> bool:
            rivals, own = values[layer], values[place]
            return not ((rivals >= own).all(axis=1) & (rivals > own).any(axis=1)).any()

        return bisect_left(layers, True, key=is_free)

    return find


def crowding(objectives: NDArray[np.float64]) -> NDArray[np.float64]:
    """Crowding distance of each row of one front [n, m]; infinite at the ends of an objective.

    An objective on which all rows are equal says nothing and adds nothing.
    """
    distance = np.zeros(len(objectives))
    for column in objectives.T:
        order = np.argsort(column, kind="stable")
        values = column[order]
        # Halves keep the span of the largest floats finite.
        span = values[-1] / 2 - values[0] / 2
        if span == 0:
            continue
        gaps = values[2:] / 2 - values[:-2] / 2
        distance[order[1:-1]] += gaps / span
        distance[order[[0, -1]]] = np.inf
    return distance


def crowded_scores(fitnesses: Sequence[Fitness]) -> list[float | None]:
    """Scores in NSGA-II's order: front first, then crowding; None for failed candidates.

    Selection by tournament of size 2 on these is NSGA-II's binary tournament.
    """
    keys: dict[int, tuple[int, float]] = {}
    for depth, front in enumerate(fronts(fitnesses)):
        alive = [index for index in front if not fitnesses[index].is_failed]
        if alive:
            distances = crowding(np.array([_vector(fitnesses[index]) for index in alive]))
            pairs = zip(alive, distances, strict=True)
            keys.update({index: (-depth, float(distance)) for index, distance in pairs})
    places = {key: float(place) for place, key in enumerate(sorted(set(keys.values())))}
    return [places[keys[index]] if index in keys else None for index in range(len(fitnesses))]


def nsga2(fitnesses: Sequence[Fitness], *, count: int) -> tuple[int, ...]:
    """The survivors: whole fronts while they fit, then the least crowded of the next one."""
    return elites(crowded_scores(fitnesses), count=count)


def _vector(fitness: Fitness) -> tuple[float, ...]:
    assert fitness.score is not None
    return fitness.objectives or (fitness.score,)


Outcome = Literal["new", "improved", "rejected"]


class FeatureConfig(Config):
    """One dimension of the grid."""

    name: str
    """The feature's name, as candidates report it."""
    low: float = 0.0
    """Lower edge of the first bin; smaller values fall into the first bin."""
    high: float = 1.0
    """Upper edge of the last bin; larger values fall into the last bin."""
    bins: int = Field(default=10, ge=1)
    """Number of bins of equal width."""

    @model_validator(mode="after")
    def _check_edges(self) -> "FeatureConfig":
        if not 0 < self.high - self.low < math.inf:
            raise ValueError(
                f"the feature {self.name} goes from {self.low} to {self.high}; "
                "both are finite and low is below high."
            )
        return self


class ArchiveConfig(Config):
    """The grid of an archive."""

    features: tuple[FeatureConfig, ...] = Field(min_length=1)
    """The dimensions; the grid has the product of their bins as cells."""

    @model_validator(mode="after")
    def _check_names(self) -> "ArchiveConfig":
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise ValueError(f"the features {names} name one dimension twice; name each once.")
        return self

    @property
    def num_cells(self) -> int:
        return math.prod(feature.bins for feature in self.features)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The elite of one cell."""

    id: str
    score: float
    features: tuple[float, ...]
    """In the order of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The grid as a value. Cells are keyed by their bins: "3,0" is bin 3 of the first feature."""

    config: ArchiveConfig
    cells: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def best(self) -> Entry | None:
        """The highest score of all cells, the earliest filled cell on a tie."""
        return max(self.cells.values(), key=lambda entry: entry.score, default=None)

    @property
    def quality(self) -> float:
        """The sum of scores over cells; comparable between archives when scores are >= 0."""
        return math.fsum(entry.score for entry in self.cells.values())


def cell_of(config: ArchiveConfig, features: Mapping[str, float]) -> str:
    """The key of the cell that these features fall into."""
    return ",".join(
        str(_bin(feature, value))
        for feature, value in zip(config.features, _values(config, features), strict=True)
    )


def insert(
    archive: Archive, candidate: str, *, score: float | None, features: Mapping[str, float]
) -> tuple[Archive, Outcome]:
    """The archive with the candidate in its cell, if the cell is empty or the score is higher.

    On an equal score the one that is there stays. A failed candidate (None) is rejected.
    """
    extended, (outcome,) = extend(archive, [(candidate, score, features)])
    return extended, outcome


def extend(
    archive: Archive, candidates: Iterable[tuple[str, float | None, Mapping[str, float]]]
) -> tuple[Archive, list[Outcome]]:
    """The archive after several insertions of (id, score, features), in order: the grid is copied
    once and not for each of them."""
    cells, outcomes = dict(archive.cells), []
    for candidate, score, features in candidates:
        outcomes.append(_place(cells, archive.config, candidate, score, features))
    return replace(archive, cells=cells), outcomes


def _place(
    cells: dict[str, Entry],
    config: ArchiveConfig,
    candidate: str,
    score: float | None,
    features: Mapping[str, float],
) -> Outcome:
    if score is None:
        return "rejected"
    if not math.isfinite(score):
        raise ValueError(f"Got the score {score} for {candidate}: it is finite, or None.")
    cell = cell_of(config, features)
    holder = cells.get(cell)
    if holder is not None and score <= holder.score:
        return "rejected"
    cells[cell] = Entry(id=candidate, score=score, features=_values(config, features))
    return "new" if holder is None else "improved"


def sample(archive: Archive, *, count: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Ids of `count` elites, every filled cell with the same chance, none twice.

    Fewer come back when fewer cells are filled.
    """
    # Sorted, so that the draw depends on the content and not on the order of insertion.
    ids = [archive.cells[cell].id for cell in sorted(archive.cells)]
    return tuple(ids[int(index)] for index in rng.permutation(len(ids))[:count])


def _values(config: ArchiveConfig, features: Mapping[str, float]) -> tuple[float, ...]:
    names = [feature.name for feature in config.features]
    values = tuple(float(features[name]) for name in names if name in features)
    if len(values) != len(names) or not all(math.isfinite(value) for value in values):
        raise ValueError(
            f"Got the features {dict(features)}: the grid needs a finite number for {names}."
        )
    return values


def _bin(feature: FeatureConfig, value: float) -> int:
    inside = min(feature.high, max(feature.low, value))
    share = (inside - feature.low) / (feature.high - feature.low)
    return min(feature.bins - 1, math.floor(share * feature.bins))
