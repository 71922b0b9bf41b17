"""An evolution strategy over seeds: directions are seeds, an update is a weight for each of them.

    es = Es(config=EsConfig(), seed=7)
    fitness = {p.id: evaluate(centre + p.sign * es.config.sigma * noise(p.seed)) for p in ask(es)}
    es = tell(es, fitness)
    centre += sum(u.weight * noise(u.seed) for u in es.updates[-1])

The caller draws `noise(seed)`, standard normal, with one generator per tensor, keyed by its name
(else tensors of one shape get the same noise). No tensor is stored: the centre is its start plus
all `updates`, so any generation can be rebuilt.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError, install_extra
from rookery.search.candidate import Fitness, fitness_ranks
from rookery.seeding import stream, stream_seed

__all__ = [
    "Cmaes",
    "CmaesConfig",
    "Es",
    "EsConfig",
    "Perturbation",
    "Point",
    "SeedWeight",
    "ask",
    "average_start",
    "load_library",
    "population_size",
    "tell",
    "utilities",
]


class EsConfig(Config):
    """Mirrored evolution strategy with centred ranks."""

    num_pairs: int = Field(default=16, ge=1)
    """Directions per generation; each is tried with both signs, for twice as many evaluations."""
    sigma: float = Field(default=0.1, gt=0.0)
    """Length of a trial step, in units of the noise. With noise scaled to each tensor's standard
    deviation, 0.1 changes every weight by a tenth of it."""
    learning_rate: float = Field(default=1.0, gt=0.0)
    """Length of the update relative to the trial step: 1 moves by about sigma / 2 along a clear
    slope. The classic rate alpha of alpha / (n sigma) is learning_rate * sigma^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """One trial: the centre moved by sign * sigma * noise(seed)."""

    id: str
    """e003-p05-pos or e003-p05-neg: generation 3, direction 5."""
    seed: int
    sign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedWeight:
    """One term of an update: weight * noise(seed) is added to the centre."""

    seed: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Es:
    """The strategy as a value: its next trials follow from the number of updates made."""

    config: EsConfig
    seed: int
    updates: tuple[tuple[SeedWeight, ...], ...] = ()
    """One per finished generation."""

    @property
    def generation(self) -> int:
        return len(self.updates)


def ask(es: Es) -> tuple[Perturbation, ...]:
    """Return the trials of this generation: every direction with both signs."""
    trials = []
    for pair in range(es.config.num_pairs):
        seed = stream_seed(es.seed, "es", es.generation, pair)
        name = f"e{es.generation:03d}-p{pair:02d}"
        trials.append(Perturbation(id=f"{name}-pos", seed=seed, sign=1))
        trials.append(Perturbation(id=f"{name}-neg", seed=seed, sign=-1))
    return tuple(trials)


def tell(es: Es, fitness: Mapping[str, Fitness]) -> Es:
    """Add the update that follows from these measurements. Failed trials share the lowest utility.
    If all are equal, or all failed, every weight is 0."""
    trials = ask(es)
    if set(fitness) != {trial.id for trial in trials}:
        missing = sorted({trial.id for trial in trials} - set(fitness))
        unknown = sorted(set(fitness) - {trial.id for trial in trials})
        raise ValueError(f"The trials {missing} are missing, {unknown} were not asked for.")
    utility = utilities({trial.id: fitness[trial.id] for trial in trials})
    scale = es.config.learning_rate * es.config.sigma / es.config.num_pairs
    update = tuple(
        SeedWeight(seed=forth.seed, weight=scale * (utility[forth.id] - utility[back.id]))
        for forth, back in zip(trials[::2], trials[1::2], strict=True)
    )
    return replace(es, updates=(*es.updates, update))


def utilities(fitness: Mapping[str, Fitness]) -> dict[str, float]:
    """Return centred ranks: -0.5 for the worst to 0.5 for the best, ties share; their sum is 0.
    Only the order counts, so an outlier cannot dominate the update."""
    middle = (len(fitness) - 1) / 2
    ranks = fitness_ranks(list(fitness.values()))
    return {
        id: (rank - middle) / max(1, len(fitness) - 1)
        for id, rank in zip(fitness, ranks, strict=True)
    }


# CMA-ES over a few numbers, such as the coefficients of a merge, through the `cma` library.
#
#     search = Cmaes(CmaesConfig(), seed=7, start=(0.5, 0.5, 0.5))
#     points = search.ask()                       # tuples of coefficients
#     search.tell([evaluate(point) for point in points])
#
# Its points follow from its start and its measurements: to resume another process's search, tell it
# the same measurements again. It is never pickled.


Point = tuple[float, ...]


class CmaesConfig(Config):
    """Covariance matrix adaptation."""

    population: int | None = Field(default=None, ge=2)
    """Points per generation; null: 4 + 3 ln(number of coefficients), rounded down."""
    sigma: float = Field(default=0.25, gt=0.0)
    """Standard deviation of the first points around the start."""
    low: float | None = Field(default=0.0)
    """Smallest value of a coefficient; null is no limit."""
    high: float | None = Field(default=1.5)
    """Largest value of a coefficient; null is no limit."""

    @model_validator(mode="after")
    def _check_limits(self) -> "CmaesConfig":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"coefficients go from {self.low} to {self.high}; low must be below high: "
                "write for example low: 0, high: 1.5."
            )
        return self


def average_start(config: CmaesConfig, *, count: int) -> Point:
    """Return the uniform average of `count` coefficients, as near as the limits allow."""
    low = 0.0 if config.low is None else config.low
    high = max(1.0, low) if config.high is None else config.high
    return (min(high, max(low, 1.0 / count)),) * count


def population_size(config: CmaesConfig, *, count: int) -> int:
    """Return the points per generation over `count` coefficients."""
    return config.population or 4 + math.floor(3 * math.log(count))


class Cmaes:
    """The optimiser. It only uses ranks, so failed points simply rank last."""

    def __init__(self, config: CmaesConfig, *, seed: int, start: Point) -> None:
        """`start` is the first mean, of at least two coefficients."""
        self._config = config
        self._seed = seed
        self._num_told = 0
        self._normal = stream(seed, "cmaes", 0)
        self._optimiser = self._build(start)
        self._points: tuple[Point, ...] = ()

    @property
    def mean(self) -> Point:
        """The centre of the search within the limits: the best guess under noise."""
        centre = self._optimiser.boundary_handler.repair(self._optimiser.mean)
        return tuple(float(value) for value in centre)

    @property
    def sigma(self) -> float:
        return float(self._optimiser.sigma)

    def ask(self) -> tuple[Point, ...]:
        """Return the points of this generation; the same ones until they are measured."""
        if not self._points:
            self._normal = stream(self._seed, "cmaes", self._num_told)
            drawn = self._optimiser.ask()
            self._points = tuple(tuple(float(value) for value in point) for point in drawn)
        return self._points

    def tell(self, fitness: Sequence[Fitness]) -> None:
        """Take the measurements of the points, in the order of `ask`."""
        points = self.ask()
        if len(fitness) != len(points):
            raise ValueError(
                f"Got {len(fitness)} measurements of {len(points)} points: each needs one."
            )
        losses = [-rank for rank in fitness_ranks(fitness)]
        self._optimiser.tell([np.array(point) for point in points], losses)
        self._num_told += 1
        self._points = ()

    def _build(self, start: Point) -> Any:
        config = self._config
        if len(start) < 2 or not all(math.isfinite(value) for value in start):
            raise ConfigError(
                f"CMA-ES got the start {start}: it needs at least two finite coefficients. "
                "With a single one, try a few values instead."
            )
        low = -math.inf if config.low is None else config.low
        high = math.inf if config.high is None else config.high
        if not all(low <= value <= high for value in start):
            raise ConfigError(
                f"CMA-ES got the start {start}, outside its limits {low} to {high}: "
                "move the start inside, or widen low and high."
            )
        options = {
            "bounds": [config.low, config.high],
            "randn": self._draw,
            "seed": math.nan,  # nan: leave the global generator alone
            "verbose": -10,  # below -9 it reads no files either
            "verb_log": 0,
            "popsize": population_size(config, count=len(start)),
        }
        return load_library().CMAEvolutionStrategy(list(start), config.sigma, options)

    def _draw(self, *shape: int) -> NDArray[np.float64]:
        return self._normal.standard_normal(shape)


def load_library() -> Any:
    """Import the `cma` package; ConfigError if it is not installed."""
    try:
        with warnings.catch_warnings():
            # It warns about missing matplotlib, which is not used here.
            warnings.simplefilter("ignore")
            import cma
    except ImportError:
        raise ConfigError(
            f"CMA-ES needs the package cma, which is not installed: {install_extra('cmaes')}."
        ) from None
    return cma
