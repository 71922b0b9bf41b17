"""CMA-ES over a few numbers, such as the coefficients of a merge, through the `cma` library.

    search = Cmaes(CmaesState(config=CmaesConfig(), seed=7, start=(0.5, 0.5, 0.5)))
    points = search.ask()                       # tuples of coefficients
    search.tell([evaluate(point) for point in points])
    document = dump(search.state)
    search = Cmaes(load(CmaesState, document))  # goes on exactly from here

The optimiser itself cannot be written as JSON and is never pickled. Its state is its start and
what it was told; `Cmaes(state)` replays that, in milliseconds per generation, and checks that the
replay asks for the recorded points.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError, RunError
from rookery.search.fitness import Fitness, fitness_ranks
from rookery.seeding import stream

__all__ = ["Cmaes", "CmaesConfig", "CmaesState", "CmaesStep"]

Point = tuple[float, ...]

REPLAY_TOLERANCE = 1e-9
"""Replay on the machine that wrote the state is exact; another one may round differently."""


class CmaesConfig(Config):
    """Covariance matrix adaptation."""

    population: int | None = Field(default=None, ge=2)
    """Points per generation; the default is 4 + 3 ln(number of coefficients), rounded down."""
    sigma: float = Field(default=0.25, gt=0.0)
    """Standard deviation of the first points around the start."""
    low: float | None = 0.0
    """Smallest value of a coefficient; null is no limit."""
    high: float | None = 1.5
    """Largest value of a coefficient; null is no limit."""

    @model_validator(mode="after")
    def _check_limits(self) -> "CmaesConfig":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"coefficients go from {self.low} to {self.high}; low must be below high: "
                "write for example low: 0, high: 1.5."
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CmaesStep:
    """One generation: the points that were asked for and their ranks, 0 for the worst."""

    points: tuple[Point, ...]
    ranks: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CmaesState:
    """Everything that determines the search."""

    config: CmaesConfig
    seed: int
    start: Point
    """The first mean; at least two coefficients."""
    history: tuple[CmaesStep, ...] = ()


class Cmaes:
    """The optimiser at a state. Ranks are all it sees, so failed points simply rank last."""

    def __init__(self, state: CmaesState) -> None:
        self._state = replace(state, history=())
        self._normal = stream(state.seed, "cmaes", 0)
        self._optimiser = self._build()
        self._points: tuple[Point, ...] = ()
        for step in state.history:
            self._replay(step)

    @property
    def state(self) -> CmaesState:
        """The state after the last `tell`; points asked for since then are asked for again."""
        return self._state

    @property
    def mean(self) -> Point:
        """The centre of the search, the best guess under noise; inside the limits."""
        centre = self._optimiser.boundary_handler.repair(self._optimiser.mean)
        return tuple(float(value) for value in centre)

    def ask(self) -> tuple[Point, ...]:
        """The points of this generation; the same ones until they are told."""
        if not self._points:
            self._normal = stream(self._state.seed, "cmaes", len(self._state.history))
            drawn = self._optimiser.ask()
            self._points = tuple(tuple(float(value) for value in point) for point in drawn)
        return self._points

    def tell(self, fitness: Sequence[Fitness]) -> None:
        """Measurements of the points, in the order they were asked for."""
        if len(fitness) != len(self.ask()):
            raise ValueError(
                f"Got {len(fitness)} measurements of {len(self.ask())} points: each needs one."
            )
        self._step(tuple(fitness_ranks(fitness)))

    def _step(self, ranks: tuple[float, ...]) -> None:
        points = self.ask()
        self._optimiser.tell([np.array(point) for point in points], [-rank for rank in ranks])
        step = CmaesStep(points=points, ranks=ranks)
        self._state = replace(self._state, history=(*self._state.history, step))
        self._points = ()

    def _replay(self, step: CmaesStep) -> None:
        asked = self.ask()
        if np.shape(asked) != np.shape(step.points) or not np.allclose(
            asked, step.points, rtol=REPLAY_TOLERANCE, atol=REPLAY_TOLERANCE
        ):
            raise RunError(
                f"Replaying generation {len(self._state.history)} of CMA-ES gives other points "
                "than were recorded: go on with the versions of cma and numpy that began the run."
            )
        self._step(step.ranks)

    def _build(self) -> Any:
        start, config = self._state.start, self._state.config
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
        } | ({} if config.population is None else {"popsize": config.population})
        return _library().CMAEvolutionStrategy(list(start), config.sigma, options)

    def _draw(self, *shape: int) -> NDArray[np.float64]:
        return self._normal.standard_normal(shape)


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            # It warns that matplotlib, which is not used here, is missing.
            warnings.simplefilter("ignore")
            import cma
    except ImportError:
        raise ConfigError(
            "CMA-ES needs the package cma, which is not installed: pip install 'rookery[evolve]'."
        ) from None
    return cma
