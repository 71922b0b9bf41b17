"""Fitness: failures, constraints and their order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import ConfigError
from rookery.search.fitness import (
    FAILED,
    Fitness,
    comparable_scores,
    fitness_of,
    fitness_ranks,
    rank_key,
)

fitnesses = st.lists(
    st.just(FAILED)
    | st.builds(
        Fitness, score=st.integers(-5, 5).map(float), violation=st.sampled_from([0.0, 0.5, 2.0])
    ),
    max_size=10,
)


def test_worked_example() -> None:
    fitness = fitness_of(
        {"a": 0.5, "b": 0.25}, weights={"a": 3.0, "b": 1.0}, floors={"a": 0.5, "b": 0.375}
    )
    assert fitness == Fitness(score=0.4375, objectives=(0.5, 0.25), violation=0.125)


def test_a_source_may_be_a_constraint_only() -> None:
    fitness = fitness_of({"a": 0.5, "b": 0.2}, weights={"a": 1.0}, floors={"b": 0.1})
    assert (fitness.score, fitness.violation) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("weights", "error"),
    [({"a": 0.0}, ConfigError), ({"a": 1.0, "b": -1.0}, ConfigError), ({"c": 1.0}, ValueError)],
)
def test_unusable_weights_get_a_sentence(weights: dict[str, float], error: type[Exception]) -> None:
    with pytest.raises(error):
        fitness_of({"a": 0.5, "b": 0.5}, weights=weights)


@pytest.mark.parametrize(
    "fields",
    [{"score": float("nan")}, {"score": 1.0, "objectives": (float("inf"),)}],
)
def test_numbers_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="score=None"):
        Fitness(**fields)
    with pytest.raises(ValueError, match="0 \\(feasible\\)"):
        Fitness(score=1.0, violation=-0.1)


@given(fitnesses)
def test_scores_agree_with_the_order(population: list[Fitness]) -> None:
    scores = comparable_scores(population)
    for a, score_a in zip(population, scores, strict=True):
        assert (score_a is None) == a.is_failed
        for b, score_b in zip(population, scores, strict=True):
            if score_a is not None and score_b is not None:
                assert (rank_key(a) > rank_key(b)) <= (score_a > score_b) or (
                    score_a == score_b and a.violation > 0 and b.violation > 0
                )


def test_infeasible_never_beats_feasible() -> None:
    population = [Fitness(score=9.0, violation=0.1), Fitness(score=-3.0), FAILED]
    assert comparable_scores(population) == [-3.1, -3.0, None]
    assert sorted(population, key=rank_key) == [population[2], population[0], population[1]]


@given(fitnesses)
def test_ranks_follow_the_order(population: list[Fitness]) -> None:
    ranks = fitness_ranks(population)
    assert sum(ranks) == sum(range(len(population)))
    for a, rank_a in zip(population, ranks, strict=True):
        for b, rank_b in zip(population, ranks, strict=True):
            assert (rank_key(a) > rank_key(b)) == (rank_a > rank_b)
