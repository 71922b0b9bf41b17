"""The verdict at the top of the page."""

from typing import Any

import pytest
from ui.made import made_report, made_row

from rookery.reports import parse_genome_report
from rookery.ui.headline import Headline, make_headline


def headline(**keys: Any) -> Headline:
    return make_headline(parse_genome_report(made_report(**keys)))


def winner(low: float, high: float) -> list[dict[str, Any]]:
    gain = {"mean": (low + high) / 2, "low": low, "high": high}
    return [made_row("evolved", 0.9, is_winner=True, gain=gain)]


@pytest.mark.parametrize(
    ("low", "high", "verdict", "words"),
    [
        (0.01, 0.2, "better", "above zero"),
        (0.0, 0.2, "unclear", "Not distinguishable from chance"),
        (-0.1, 0.2, "unclear", "Not distinguishable from chance"),
        (-0.2, 0.0, "unclear", "Not distinguishable from chance"),
        (-0.2, -0.01, "worse", "below zero"),
    ],
)
def test_the_interval_of_the_gain_decides(
    low: float, high: float, verdict: str, words: str
) -> None:
    said = headline(rows=winner(low, high))
    assert said.verdict == verdict
    assert words in said.sentence


def test_a_gain_without_an_interval_is_no_result() -> None:
    rows = [made_row("evolved", 0.9, is_winner=True, gain=None)]
    assert headline(rows=rows).verdict == "unmeasured"


def test_candidates_and_tasks_are_disclosed() -> None:
    assert "Chosen among 46 candidates; measured once on 120 report tasks." in headline().context
    context = headline(merit="mixed").context
    assert "candidates by rewards and the probability of the right choices together" in context


def test_a_baseline_above_the_winner_is_named() -> None:
    rows = [made_row("evolved", 0.8, is_winner=True), made_row("plain sum", 0.85)]
    assert "Higher on the same tasks: plain sum (0.850)." in headline(rows=rows).context
    assert "Higher" not in headline().context


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.01, 0.2, "unclear"), (-0.1, 0.2, "unclear"), (-2, -1, "worse")]
)
def test_a_base_model_above_the_winner_is_said_first(low: float, high: float, verdict: str) -> None:
    said = headline(rows=[*winner(low, high), made_row("base model", 0.95)])
    assert said.verdict == verdict
    assert said.sentence.startswith(
        "The base model without any adapter scores higher: 0.950 against 0.900. "
    )
    below = headline(rows=[*winner(0.1, 0.2), made_row("base model", 0.9)])
    assert below.verdict == "better" and "base model" not in below.sentence


def test_a_founder_that_wins_is_called_one() -> None:
    lineage = [{"id": "founder-a", "generation": 0, "operator": "founder", "is_winner": True}]
    assert "The winner is a founder" in headline(lineage=lineage).context
    assert "The winner is a founder" not in headline().context


def test_an_unfinished_run_tells_how_far_it_is() -> None:
    said = headline(rows=[])
    assert said.verdict == "unfinished"
    assert said.winner is None
    assert said.context == "Best score on the search tasks so far: 0.800, in generation 2."


def test_a_run_that_has_measured_nothing_says_nothing_of_scores() -> None:
    assert headline(rows=[], generations=[{"generation": 0}]).context == ""


def test_the_best_may_be_negative() -> None:
    generations = [{"generation": 0, "best": -2.0}, {"generation": 1, "best": -1.0}]
    assert "-1.000, in generation 1" in headline(rows=[], generations=generations).context
