"""CMA-ES over a few numbers, such as the coefficients of a merge, through the `cma` library.

    search = Cmaes(CmaesConfig(), seed=7, start=(0.5, 0.5, 0.5))
    points = search.ask()                       # tuples of coefficients
    search.tell([evaluate(point) for point in points])

What it asks follows from its start and what it was told: to go on from where another process was,
tell it the same again. It is never pickled.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.search.fitness import Fitness, fitness_ranks
from rookery.seeding import stream

__all__ = ["Cmaes", "CmaesConfig", "average_start", "load_library", "population_size"]

Point = tuple[float, ...]


class CmaesConfig(Config):
    """Covariance matrix adaptation."""

    population: int | None = Field(default=None, ge=2)
    """Points per generation; the default is 4 + 3 ln(number of coefficients), rounded down."""
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
    """The uniform average of so many, as near as the limits allow."""
    low = 0.0 if config.low is None else config.low
    high = max(1.0, low) if config.high is None else config.high
    return (min(high, max(low, 1.0 / count)),) * count


def population_size(config: CmaesConfig, *, count: int) -> int:
    """Points per generation over so many coefficients."""
    return config.population or 4 + math.floor(3 * math.log(count))


class Cmaes:
    """The optimiser. Ranks are all it sees, so failed points simply rank last."""

    def __init__(self, config: CmaesConfig, *, seed: int, start: Point) -> None:
        """`start` is the first mean; at least two coefficients."""
        self._config = config
        self._seed = seed
        self._num_told = 0
        self._normal = stream(seed, "cmaes", 0)
        self._optimiser = self._build(start)
        self._points: tuple[Point, ...] = ()

    @property
    def mean(self) -> Point:
        """The centre of the search, the best guess under noise; inside the limits."""
        centre = self._optimiser.boundary_handler.repair(self._optimiser.mean)
        return tuple(float(value) for value in centre)

    @property
    def sigma(self) -> float:
        """The size of its steps now."""
        return float(self._optimiser.sigma)

    def ask(self) -> tuple[Point, ...]:
        """The points of this generation; the same ones until they are told."""
        if not self._points:
            self._normal = stream(self._seed, "cmaes", self._num_told)
            drawn = self._optimiser.ask()
            self._points = tuple(tuple(float(value) for value in point) for point in drawn)
        return self._points

    def tell(self, fitness: Sequence[Fitness]) -> None:
        """Measurements of the points, in the order they were asked for."""
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
            "verbose": -10,  # below -9 no file is looked at either
            "verb_log": 0,
            "popsize": population_size(config, count=len(start)),
        }
        return load_library().CMAEvolutionStrategy(list(start), config.sigma, options)

    def _draw(self, *shape: int) -> NDArray[np.float64]:
        return self._normal.standard_normal(shape)


def load_library() -> Any:
    """The `cma` package; ConfigError where it is not installed."""
    try:
        with warnings.catch_warnings():
            # It warns that matplotlib, which is not used here, is missing.
            warnings.simplefilter("ignore")
            import cma
    except ImportError:
        raise ConfigError(
            "CMA-ES needs the package cma, which is not installed: pip install 'rookery[cmaes]'."
        ) from None
    return cma
