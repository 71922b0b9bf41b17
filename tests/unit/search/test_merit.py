"""What an answer counts in a search."""

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import ConfigError
from rookery.search.candidate import (
    FAILED,
    Fitness,
    comparable_scores,
    fitness_of,
    fitness_ranks,
    rank_key,
)
from rookery.search.merit import Merit, merits_at, merits_of, vote

REWARDS = {"chosen": 0.0, "written": 1.0}
CERTAINTIES = {"chosen": 0.25, "unanswered": 0.9}
CHOICES = {"chosen": 2, "unanswered": 2}


def test_choices_count_by_probability_and_other_tasks_by_reward() -> None:
    assert merits_of(REWARDS, CERTAINTIES, merit="reward", num_choices=CHOICES) == REWARDS
    found = merits_of(REWARDS, CERTAINTIES, merit="certainty", num_choices=CHOICES)
    assert found == {"chosen": 0.25, "written": 1.0}


@pytest.mark.parametrize(
    ("probability", "merit"), [(1.0, 1.0), (0.5, 0.75), (0.0625, 0.0), (1e-9, 0.0), (0.0, 0.0)]
)
def test_log_certainty_stays_in_the_range_of_rewards(probability: float, merit: float) -> None:
    found = merits_of({"t": 1.0}, {"t": probability}, merit="log_certainty", num_choices={"t": 2})
    assert found == {"t": pytest.approx(merit)}


def test_log_certainty_tells_candidates_apart_among_many_choices() -> None:
    """The likeliest of 64 may have a probability of 1/16, four times that of a guess."""

    def log_certainty(halvings: int, num_choices: int) -> float:
        certainties, count = {"t": 2.0**-halvings}, {"t": num_choices}
        found = merits_of({"t": 0.0}, certainties, merit="log_certainty", num_choices=count)
        return found["t"]

    assert [log_certainty(n, 64) for n in (0, 3, 6, 9, 12, 20)] == pytest.approx(
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    )
    assert log_certainty(4, 64) > log_certainty(5, 64)
    assert [log_certainty(2, count) for count in (2, 3, 4)] == [0.5] * 3


def test_a_mixed_merit_is_the_mean_of_the_three() -> None:
    """A right answer always counts more than a wrong one that is as certain."""
    asked: dict[str, Any] = {"certainties": {"t": 0.25}, "num_choices": {"t": 4}, "merit": "mixed"}
    found = [merits_of({"t": reward, "u": 0.5}, **asked) for reward in (0.0, 1.0)]
    assert found == [
        {"t": pytest.approx((0.25 + 0.5 + reward) / 3), "u": 0.5} for reward in (0.0, 1.0)
    ]


@pytest.mark.parametrize("merit", get_args(Merit))
def test_what_is_expected_of_certainties_is_what_they_count(merit: Merit) -> None:
    """Also of many choices, also rewards of tasks without choices. The reward rises around the
    limit, and is nearly there far from it."""
    num_choices, limits = [2, 40, 0], np.array([0.5, 0.1, 0.5])
    certainties = np.array([[0.05, 0.01, 1.0], [0.95, 0.5, 0.0]])
    found = merits_at(certainties, merit=merit, num_choices=num_choices, limits=limits)
    for own, answers in zip(found, certainties, strict=True):
        asked = merits_of(
            dict(zip("abc", [*(answers[:2] > limits[:2]).astype(float), answers[2]], strict=True)),
            dict(zip("ab", answers[:2], strict=True)),
            merit=merit,
            num_choices={"a": 2, "b": 40},
        )
        assert own == pytest.approx(list(asked.values()), abs=0.002)
    at_limit = merits_at(limits[None], merit="reward", num_choices=num_choices, limits=limits)
    assert at_limit[0] == pytest.approx([0.5, 0.5, 0.5])


# The vote.


def test_the_most_frequent_answer_wins() -> None:
    assert vote(["7", "12", "12"]) == "12"
    assert vote(["a", "b", "b", "a", "c"]) == "a"


def test_ties_go_to_the_better_voter() -> None:
    assert vote(["7", "12"]) == "7"
    assert vote(["12", "7"]) == "12"
    assert vote([None, "7", "12", "12", "7"]) == "7"


def test_who_has_no_answer_does_not_vote() -> None:
    assert vote([None, None, "3"]) == "3"
    assert vote([None, None]) is None
    assert vote([]) is None


# Fitness.


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
