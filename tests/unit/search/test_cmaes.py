"""CMA-ES: it climbs, asks the same again when told the same, and leaves the world alone."""

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rookery.errors import ConfigError
from rookery.search.es import Cmaes, CmaesConfig, average_start
from rookery.search.fitness import FAILED, Fitness

TARGET = (0.81, 1.41, 0.57)


def distance(point: Sequence[float]) -> float:
    return sum((x - t) ** 2 for x, t in zip(point, TARGET, strict=True))


def begun(seed: int = 0, **fields: Any) -> Cmaes:
    return Cmaes(CmaesConfig(**fields), seed=seed, start=(0.5, 0.5, 0.5))


def climb(search: Cmaes, *, steps: int) -> Cmaes:
    for _ in range(steps):
        search.tell([Fitness(score=-distance(point)) for point in search.ask()])
    return search


@pytest.mark.parametrize("seed", range(3))
def test_a_quadratic_improves(seed: int) -> None:
    search = climb(begun(seed), steps=25)
    assert distance(search.mean) < 0.001 < distance((0.5, 0.5, 0.5))


def test_told_the_same_it_asks_the_same() -> None:
    first, second = climb(begun(), steps=5), climb(begun(), steps=5)
    assert first.ask() == second.ask() and first.mean == second.mean


def test_points_stay_until_told_and_inside_the_limits() -> None:
    search = begun(sigma=2.0, population=20)
    points = search.ask()
    assert points == search.ask()
    assert len(points) == 20
    assert all(0 <= x <= 1.5 for point in points for x in point)
    assert points != begun(seed=1, sigma=2.0, population=20).ask()
    wide = begun(sigma=9.0, low=None, high=None)
    assert max(abs(x) for point in wide.ask() for x in point) > 5
    assert len(wide.mean) == 3


@pytest.mark.parametrize("fitness", [FAILED, Fitness(score=0.0), Fitness(score=-2.0)])
def test_equal_and_failed_points_do_not_stop_it(fitness: Fitness) -> None:
    search = begun()
    for _ in range(30):
        search.tell([fitness] * len(search.ask()))
    assert all(np.isfinite(search.mean))


def test_a_failed_point_ranks_last() -> None:
    failed, worst = begun(population=4), begun(population=4)
    for search, last in ((failed, FAILED), (worst, Fitness(score=-99.0))):
        search.ask()
        search.tell([Fitness(score=-5.0), last, Fitness(score=-9.0), Fitness(score=-5.0)])
    assert failed.ask() == worst.ask()


def test_the_start_is_the_average_inside_the_limits() -> None:
    assert average_start(CmaesConfig(), count=4) == (0.25,) * 4
    assert average_start(CmaesConfig(low=0.5), count=4) == (0.5,) * 4
    assert average_start(CmaesConfig(low=2.0, high=None), count=2) == (2.0, 2.0)


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(4)
    before = np.random.get_state(legacy=False)["state"]
    climb(begun(), steps=4)
    after = np.random.get_state(legacy=False)["state"]
    assert (after["key"] == before["key"]).all() and after["pos"] == before["pos"]


def test_wrong_input_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="two finite"):
        Cmaes(CmaesConfig(), seed=0, start=(0.5,))
    with pytest.raises(ConfigError, match="outside its limits"):
        Cmaes(CmaesConfig(), seed=0, start=(0.5, 2.0))
    with pytest.raises(ValueError, match="low must be below high"):
        CmaesConfig(low=2.0)
    with pytest.raises(ValueError, match="each needs one"):
        begun().tell([FAILED])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> object:
        if name == "cma":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="rookery\\[cmaes\\]"):
        begun()
