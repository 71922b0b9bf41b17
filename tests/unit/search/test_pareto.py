"""Fronts against brute force, crowding against hand-made numbers, constraints by domination."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.archive import crowded_scores, crowding, dominates, fronts, nsga2
from rookery.search.fitness import FAILED, Fitness
from rookery.seeding import stream

points = st.lists(
    st.just(FAILED)
    | st.builds(
        Fitness,
        score=st.just(0.0),
        objectives=st.tuples(*[st.integers(0, 3).map(float)] * 3),
        violation=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    ),
    max_size=12,
)


def brute_dominates(a: Fitness, b: Fitness) -> bool:
    if a.is_failed or b.is_failed:
        return not a.is_failed and b.is_failed
    if a.violation or b.violation:
        return a.violation < b.violation
    pairs = list(zip(a.objectives, b.objectives, strict=True))
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def brute_fronts(population: list[Fitness]) -> list[set[int]]:
    left, result = set(range(len(population))), []
    while left:
        front = {
            i for i in left if not any(brute_dominates(population[j], population[i]) for j in left)
        }
        result.append(front)
        left -= front
    return result


@given(points)
def test_fronts_against_brute_force(population: list[Fitness]) -> None:
    assert [set(front) for front in fronts(population)] == brute_fronts(population)
    for a in population:
        for b in population:
            assert dominates(a, b) == brute_dominates(a, b)


@given(points, st.integers(0, 14))
def test_survivors_are_whole_fronts_then_a_part_of_the_next(
    population: list[Fitness], count: int
) -> None:
    kept = nsga2(population, count=count)
    alive = [i for i, fitness in enumerate(population) if not fitness.is_failed]
    assert len(kept) == len(set(kept)) == min(count, len(alive) or len(population))
    depth = {i: d for d, front in enumerate(brute_fronts(population)) for i in front}
    for i in set(alive) - set(kept):
        assert all(depth[k] <= depth[i] for k in kept)


def test_crowding_by_hand() -> None:
    front = np.array([[0.0, 4.0], [1.0, 3.0], [3.0, 1.0], [4.0, 0.0]])
    assert crowding(front).tolist() == [np.inf, 0.75 + 0.75, 0.75 + 0.75, np.inf]
    flat = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 3.0]])
    assert crowding(flat).tolist() == [np.inf, 1.0, np.inf]
    assert crowding(np.ones((4, 2))).tolist() == [0.0] * 4
    assert crowding(np.ones((1, 2))).tolist() == [0.0]
    extreme = np.array([[-1.7e308], [0.0], [1.7e308]])
    assert crowding(extreme).tolist() == [np.inf, 1.0, np.inf]


def test_scores_order_by_front_then_crowding() -> None:
    population = [
        Fitness(score=0.0, objectives=o)
        for o in [(0.0, 4.0), (0.5, 3.9), (3.0, 1.0), (4.0, 0.0), (0.0, 0.0)]
    ]
    *scores, failed = crowded_scores([*population, FAILED])
    assert failed is None and None not in scores
    a, b, c, d, e = (score or 0.0 for score in scores)
    assert a == d > c > b > e
    assert nsga2(population, count=3) == (0, 3, 2)


def test_a_single_objective_is_the_score() -> None:
    population = [Fitness(score=s) for s in (0.1, 0.7, 0.3)]
    assert nsga2(population, count=2) == (1, 2)


def test_do_not_get_worse_is_a_constraint() -> None:
    regressed = Fitness(score=0.9, objectives=(0.9, 0.9), violation=0.01)
    kept = Fitness(score=0.1, objectives=(0.1, 0.1))
    assert dominates(kept, regressed)
    assert not dominates(regressed, kept)


def test_different_objectives_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="same ones"):
        fronts([Fitness(score=0.0, objectives=(1.0,)), Fitness(score=0.0, objectives=(1.0, 2.0))])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_fronts_of_other_numbers_of_objectives(width: int) -> None:
    for seed in range(40):
        rng = stream(seed, width)
        pool = [
            Fitness(
                score=0.0,
                objectives=tuple(rng.integers(0, 4, width).astype(float).tolist()),
                violation=float(rng.choice([0.0, 0.0, 0.0, 0.1, 0.2])),
            )
            for _ in range(25)
        ]
        assert [set(front) for front in fronts(pool)] == brute_fronts(pool)
