"""Numbers as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.reports import Estimate, TasksetRecord
from rookery.ui import wording


def test_scores_have_three_decimals_and_missing_ones_a_hyphen() -> None:
    assert wording.score(0.91) == "0.910"
    assert wording.score(0.0) == "0.000"
    assert wording.score(None) == "-"


def test_questions_are_told_where_tasks_share_them() -> None:
    assert wording.tasks(240, 240) == wording.tasks(240, 0) == "240 tasks"
    assert wording.tasks(240, 30) == "30 questions (240 rows)"
    old, new = (
        TasksetRecord(num_report=60),
        TasksetRecord(num_report=240, num_questions=30),
    )
    assert wording.report_tasks([old], "report task") == "60 report tasks"
    assert wording.report_tasks([old, new]) == "90 questions (300 rows)"


def test_no_number_is_minus_zero() -> None:
    assert wording.score(-0.0001) == "0.000"
    assert wording.signed(-0.0004) == "+0.000"


def test_a_gain_has_signs_and_its_interval() -> None:
    gain = Estimate(mean=0.2, low=-0.15, high=0.25)
    assert wording.gain(gain) == "+0.200 (-0.150 to +0.250)"
    assert wording.gain(Estimate(mean=0.2)) == "+0.200"
    assert wording.gain(None) == ""


def test_an_interval_with_one_end_is_missing() -> None:
    assert wording.interval(Estimate(mean=0.9, low=0.88, high=0.94)) == "0.880 to 0.940"
    assert wording.interval(Estimate(mean=0.9, low=0.88)) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (3.24, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (120.5, "2 min 0 s"),
        (3599.0, "59 min 59 s"),
        (3599.7, "1 h 0 min"),
        (5400.0, "1 h 30 min"),
        (3600.0 * 1000, "1,000 h 0 min"),
        (None, "-"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert wording.duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e7))
def test_no_duration_has_sixty_of_a_unit(seconds: float) -> None:
    assert not {"60 s", "60.0 s", "60 min"} & {
        " ".join(pair) for pair in zip(*[iter(wording.duration(seconds).split())] * 2, strict=True)
    }


def test_amounts() -> None:
    assert wording.count(1234567) == "1,234,567"
    assert wording.plural(1, "candidate") == "1 candidate"
    assert wording.plural(0, "candidate") == "0 candidates"
