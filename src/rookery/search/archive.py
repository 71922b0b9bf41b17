"""A quality-diversity grid (MAP-Elites): the best candidate of every cell of feature space.

    archive = Archive(config=ArchiveConfig(features=(FeatureConfig(name="length", high=400),)))
    archive, outcome = insert(archive, "g003-c07", score=0.61, features={"length": 123.0})
    parents = sample(archive, count=2, rng=stream(seed, "archive", generation))

It holds ids, not candidates: adapters and programs alike.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from rookery.config import Config

__all__ = [
    "Archive",
    "ArchiveConfig",
    "Entry",
    "FeatureConfig",
    "Outcome",
    "cell_of",
    "extend",
    "insert",
    "sample",
]

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
