"""What an answer counts in a search."""

import pytest

from rookery.search.merit import merits_of

REWARDS = {"chosen": 0.0, "written": 1.0}
CERTAINTIES = {"chosen": 0.25, "unanswered": 0.9}


def test_choices_count_by_probability_and_other_tasks_by_reward() -> None:
    assert merits_of(REWARDS, CERTAINTIES, merit="reward") == REWARDS
    found = merits_of(REWARDS, CERTAINTIES, merit="certainty")
    assert found == {"chosen": 0.25, "written": 1.0}


@pytest.mark.parametrize(
    ("probability", "merit"), [(1.0, 1.0), (0.5, 0.75), (0.0625, 0.0), (1e-9, 0.0), (0.0, 0.0)]
)
def test_log_certainty_stays_in_the_range_of_rewards(probability: float, merit: float) -> None:
    found = merits_of({"t": 1.0}, {"t": probability}, merit="log_certainty")
    assert found == {"t": pytest.approx(merit)}
