import math

import pytest

from rookery.search.programs.program import Member, ProgramRecord, summarize
from rookery.search.programs.stopping import Stopping, StoppingConfig, advance


def after(metrics: list[dict[str, float]], config: StoppingConfig) -> list[str]:
    """The reason after each program."""
    stopping, reasons = Stopping(), []
    for serial, values in enumerate(metrics):
        record = ProgramRecord(
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
