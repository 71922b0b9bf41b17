import math

import pytest

from rookery.search.programs.database import References
from rookery.search.programs.program import numeric_metrics, score_of, summarize


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"combined_score": 0.25, "speed": 9.0}, 0.25),
        ({"speed": 1.0, "size": 2.0}, 1.5),
        ({"speed": 1.0, "size": 2.0, "cells": 50.0}, 1.5),  # cells is a feature
        ({"cells": 50.0}, 50.0),  # nothing but features
        ({}, None),
        ({"combined_score": math.nan, "speed": 9.0}, None),
        ({"combined_score": math.inf}, None),
        ({"speed": math.nan, "size": 100.0}, None),
        ({"speed": 1e308, "size": 1e308}, None),
    ],
)
def test_score_is_the_combined_one_or_the_mean(
    metrics: dict[str, float], expected: float | None
) -> None:
    assert score_of(metrics, features=("cells",)) == expected


def test_numbers_of_an_evaluator_are_taken_and_flags_are_not() -> None:
    metrics = numeric_metrics(
        {"speed": 3, "passed": True, "note": "fine", "huge": -(10**400), "combined_score": True}
    )
    assert metrics == {"speed": 3.0, "huge": -math.inf, "combined_score": 1.0}


def test_the_distance_counts_length_lines_and_characters() -> None:
    # 5 characters and 1 line more; "b", "c", "\n", "d" stand in one of the two alone.
    references = References(size=1, summaries=[summarize("aac\nddda")])
    assert references.measure(summarize("aab")) == pytest.approx(0.5 + 10 + 0.5 * 4)


def test_diversity_is_the_mean_distance_to_the_first_texts() -> None:
    references = References(size=2)
    assert references.measure(summarize("a")) == 0.0
    for code in ("a", "a", "aa", "aaa"):
        references.add(summarize(code))
    assert [one.num_chars for one in references.summaries] == [1, 2]
    assert references.measure(summarize("aaaa")) == pytest.approx((0.3 + 0.2) / 2)
    assert references.measure(summarize("aa")) == pytest.approx(0.1)  # not against itself
