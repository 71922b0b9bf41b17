"""What an answer counts in a search."""

import numpy as np
import pytest

from rookery.search.merit import Merit, certainties_of, merits_at, merits_of

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


@pytest.mark.parametrize("merit", ["certainty", "log_certainty", "reward"])
def test_certainties_are_found_again_from_merits(merit: Merit) -> None:
    """Also of many choices, also rewards of tasks without choices."""
    num_choices = [2, 40, 0]
    certainties = np.array([[0.3, 0.01, 1.0], [0.9, 0.5, 0.0]])
    merits = merits_at(certainties, merit=merit, num_choices=num_choices)
    found = certainties_of(merits, merit=merit, num_choices=num_choices)
    assert found == pytest.approx(certainties)
    asked = merits_of(
        {"a": 1.0, "b": 1.0}, {"a": 0.3, "b": 0.01}, merit=merit, num_choices={"a": 2, "b": 40}
    )
    if merit != "reward":
        assert merits[0, :2] == pytest.approx([asked["a"], asked["b"]])
