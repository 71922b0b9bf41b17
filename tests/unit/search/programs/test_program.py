import math

import pytest

from rookery.search.programs.database import References, Stopping, StoppingConfig, advance
from rookery.search.programs.program import (
    Member,
    ScoredProgram,
    numeric_metrics,
    score_of,
    summarize,
)


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


def after(metrics: list[dict[str, float]], config: StoppingConfig) -> list[str]:
    """The reason after each program."""
    stopping, reasons = Stopping(), []
    for serial, values in enumerate(metrics):
        record = ScoredProgram(
            id=str(serial), attempt=serial, island=0, metrics=values, code=summarize("")
        )
        member = Member(record=record, serial=serial, score=values.get("combined_score", 0.0),
                        features=())  # fmt: skip
        stopping = advance(stopping, member, config=config)
        reasons.append(stopping.reason)
    return reasons


def scores(*values: float) -> list[dict[str, float]]:
    return [{"combined_score": value} for value in values]


def test_patience_counts_programs_without_enough_improvement() -> None:
    config = StoppingConfig(patience=2, threshold=0.1)
    reasons = after(scores(0.1, 0.15, 0.2, 0.25, 0.29, 0.9), config)
    assert [bool(reason) for reason in reasons] == [False, False, False, False, True, True]
    assert reasons[4] == "combined_score did not improve by 0.1 in 2 programs."
    assert reasons[5] == reasons[4]


def test_a_metric_that_is_missing_is_the_mean_and_nan_does_not_count() -> None:
    config = StoppingConfig(patience=1, threshold=0.1, metric="speed")
    assert not any(after([{"speed": 1.0}, {"a": 1.0, "b": 2.0}, {"speed": math.nan}], config))
    assert after([{"speed": 1.0}, {"a": 1.0, "b": 1.1}], config)[-1]


@pytest.mark.parametrize("patience", [0, -1])
def test_without_patience_the_value_itself_is_awaited(patience: int) -> None:
    config = StoppingConfig(patience=patience, threshold=1.0)
    assert after(scores(0.5, 0.5, 1.0), config) == ["", "", "combined_score reached 1."]


def test_a_target_stops_and_nothing_else_does_by_default() -> None:
    assert not any(after(scores(*[0.5] * 50), StoppingConfig()))
    assert after(scores(0.5, 0.8), StoppingConfig(target_score=0.7))[-1].startswith("The score 0.8")
