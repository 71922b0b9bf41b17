"""The evolution strategy over seeds: it climbs, replays, and survives failures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.es import Es, EsConfig, ask, tell, utilities
from rookery.search.fitness import FAILED, Fitness
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


@pytest.mark.parametrize("seed", range(3))
def test_a_quadratic_improves(seed: int) -> None:
    es = climb(Es(config=EsConfig(num_pairs=8), seed=seed), until=60)
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


@pytest.mark.parametrize("fitness", [FAILED, Fitness(score=0.0), Fitness(score=-7.0)])
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
