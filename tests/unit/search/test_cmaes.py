"""CMA-ES: it climbs, goes on exactly after a reload, and leaves the world alone."""

import builtins
import json

import numpy as np
import pytest

from rookery.errors import ConfigError, RunError
from rookery.search.cmaes import Cmaes, CmaesConfig, CmaesState, CmaesStep
from rookery.search.fitness import FAILED, Fitness
from rookery.search.state import dump, load

TARGET = (0.81, 1.41, 0.57)


def score(point) -> Fitness:
    return Fitness(score=-sum((x - t) ** 2 for x, t in zip(point, TARGET, strict=True)))


def begun(seed: int = 0, **fields) -> CmaesState:
    return CmaesState(config=CmaesConfig(**fields), seed=seed, start=(0.5, 0.5, 0.5))


def climb(search: Cmaes, *, until: int) -> Cmaes:
    while len(search.state.history) < until:
        search.tell([score(point) for point in search.ask()])
    return search


@pytest.mark.parametrize("seed", range(3))
def test_a_quadratic_improves(seed) -> None:
    search = climb(Cmaes(begun(seed)), until=25)
    assert -score(search.mean).score < 0.001 < -score((0.5, 0.5, 0.5)).score


def test_reload_at_any_generation_goes_on_exactly() -> None:
    straight = climb(Cmaes(begun()), until=8)
    for stop in (0, 1, 5):
        saved = json.loads(json.dumps(dump(climb(Cmaes(begun()), until=stop).state)))
        assert climb(Cmaes(load(CmaesState, saved)), until=8).state == straight.state


def test_points_stay_until_told_and_inside_the_limits() -> None:
    search = Cmaes(begun(sigma=2.0, population=20))
    points = search.ask()
    assert points == search.ask() == Cmaes(search.state).ask()
    assert len(points) == 20
    assert all(0 <= x <= 1.5 for point in points for x in point)
    assert points != Cmaes(begun(seed=1, sigma=2.0, population=20)).ask()
    wide = Cmaes(begun(sigma=9.0, low=None, high=None))
    assert max(abs(x) for point in wide.ask() for x in point) > 5
    assert len(wide.mean) == 3


@pytest.mark.parametrize("fitness", [FAILED, Fitness(score=0.0), Fitness(score=-2.0)])
def test_equal_and_failed_points_do_not_stop_it(fitness) -> None:
    search = Cmaes(begun())
    for _ in range(30):
        search.tell([fitness] * len(search.ask()))
    assert all(np.isfinite(search.mean))


def test_a_failed_point_ranks_last() -> None:
    search = Cmaes(begun(population=4))
    search.ask()
    search.tell([Fitness(score=-5.0), FAILED, Fitness(score=-9.0), Fitness(score=-5.0)])
    assert search.state.history[0].ranks == (2.5, 0.0, 1.0, 2.5)


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(4)
    before = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    climb(Cmaes(begun()), until=4)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[union-attr]


def test_a_history_that_does_not_replay_is_refused() -> None:
    state = climb(Cmaes(begun()), until=1).state
    other = CmaesStep(points=((0.0, 0.0, 0.0),) * 7, ranks=state.history[0].ranks)
    with pytest.raises(RunError, match="generation 0"):
        Cmaes(CmaesState(config=state.config, seed=0, start=state.start, history=(other,)))


def test_wrong_input_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="two finite"):
        Cmaes(CmaesState(config=CmaesConfig(), seed=0, start=(0.5,)))
    with pytest.raises(ConfigError, match="outside its limits"):
        Cmaes(CmaesState(config=CmaesConfig(), seed=0, start=(0.5, 2.0)))
    with pytest.raises(ValueError, match="low must be below high"):
        CmaesConfig(low=2.0)
    with pytest.raises(ValueError, match="each needs one"):
        Cmaes(begun()).tell([FAILED])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "cma":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="rookery\\[evolve\\]"):
        Cmaes(begun())
