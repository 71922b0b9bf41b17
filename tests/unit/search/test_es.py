"""The evolution strategy over seeds: it climbs, replays, and survives failures."""

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import ConfigError
from rookery.search.candidate import FAILED, Fitness
from rookery.search.es import Cmaes, CmaesConfig, Es, EsConfig, ask, average_start, tell, utilities
from rookery.seeding import stream

DIM = 10
TARGET = np.linspace(-1, 1, DIM)


def noise(seed: int) -> np.ndarray:
    return stream(seed).normal(size=DIM)


def centre_of(es: Es) -> np.ndarray:
    terms = [u.weight * noise(u.seed) for update in es.updates for u in update]
    return np.zeros(DIM) + sum(terms)


def climb(es: Es, *, until: int) -> Es:
    centre = centre_of(es)
    while es.generation < until:
        places = {p.id: centre + p.sign * es.config.sigma * noise(p.seed) for p in ask(es)}
        scores = {id: -float(np.sum((place - TARGET) ** 2)) for id, place in places.items()}
        es = tell(es, {id: Fitness(score=score) for id, score in scores.items()})
        centre = centre + sum(u.weight * noise(u.seed) for u in es.updates[-1])
    return es


def test_a_quadratic_improves() -> None:
    es = climb(Es(config=EsConfig(num_pairs=8), seed=0), until=60)
    assert np.sum((centre_of(es) - TARGET) ** 2) < 0.1 * np.sum(TARGET**2)


def test_going_on_from_the_middle_is_as_if_uninterrupted() -> None:
    es = Es(config=EsConfig(num_pairs=4), seed=3)
    assert climb(climb(es, until=5), until=8) == climb(es, until=8)


def test_trials_are_mirrored_and_fresh_each_generation() -> None:
    es = Es(config=EsConfig(num_pairs=3), seed=1)
    trials = ask(es)
    assert [trial.sign for trial in trials] == [1, -1] * 3
    assert [t.seed for t in trials[::2]] == [t.seed for t in trials[1::2]]
    assert trials[1].id == "e000-p00-neg"
    later = ask(tell(es, {trial.id: FAILED for trial in trials}))
    assert len({t.seed for t in (*trials, *later)}) == 6


def test_update_follows_the_better_side() -> None:
    es = Es(config=EsConfig(num_pairs=1, sigma=0.5, learning_rate=2.0), seed=1)
    forth, back = ask(es)
    told = tell(es, {forth.id: Fitness(score=3.0), back.id: Fitness(score=-100.0)})
    assert [(u.seed, u.weight) for u in told.updates[-1]] == [(forth.seed, 1.0)]
    told = tell(es, {forth.id: FAILED, back.id: Fitness(score=-100.0)})
    assert told.updates[-1][0].weight == -1.0


@pytest.mark.parametrize("fitness", [FAILED, Fitness(score=-7.0)])
def test_equal_trials_change_nothing(fitness: Fitness) -> None:
    es = Es(config=EsConfig(num_pairs=3), seed=1)
    told = tell(es, {trial.id: fitness for trial in ask(es)})
    assert {u.weight for u in told.updates[-1]} == {0.0}


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_utilities_are_centred_and_ordered(scores: list[float | None]) -> None:
    fitness = {str(i): Fitness(score=score) for i, score in enumerate(scores)}
    utility = utilities(fitness)
    assert sum(utility.values()) == pytest.approx(0.0, abs=1e-12)
    assert all(-0.5 <= value <= 0.5 for value in utility.values())
    for i, a in enumerate(scores):
        for j, b in enumerate(scores):
            if b is None or (a is not None and a >= b):
                assert utility[str(i)] >= utility[str(j)]


def test_missing_trials_get_a_sentence() -> None:
    es = Es(config=EsConfig(num_pairs=1), seed=1)
    with pytest.raises(ValueError, match="e000-p00-neg"):
        tell(es, {"e000-p00-pos": FAILED})


# CMA-ES.


PLACE = (0.81, 1.41, 0.57)


def distance(point: Sequence[float]) -> float:
    return sum((x - t) ** 2 for x, t in zip(point, PLACE, strict=True))


def begun(seed: int = 0, **fields: Any) -> Cmaes:
    return Cmaes(CmaesConfig(**fields), seed=seed, start=(0.5, 0.5, 0.5))


def climb_by_cmaes(search: Cmaes, *, steps: int) -> Cmaes:
    for _ in range(steps):
        search.tell([Fitness(score=-distance(point)) for point in search.ask()])
    return search


def test_cmaes_climbs_a_quadratic() -> None:
    search = climb_by_cmaes(begun(), steps=25)
    assert distance(search.mean) < 0.001 < distance((0.5, 0.5, 0.5))


def test_told_the_same_it_asks_the_same() -> None:
    first, second = climb_by_cmaes(begun(), steps=5), climb_by_cmaes(begun(), steps=5)
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


@pytest.mark.parametrize("fitness", [FAILED, Fitness(score=-2.0)])
def test_equal_and_failed_points_do_not_stop_it(fitness: Fitness) -> None:
    search = begun()
    for _ in range(12):
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
    climb_by_cmaes(begun(), steps=4)
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
    with pytest.raises(ConfigError, match="\\[cmaes\\]"):
        begun()
