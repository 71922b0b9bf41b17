"""Reading reports: complete ones, cut short ones, and ones that are no reports."""

import math

import pytest
from ui.made import made_report, made_row

from rookery.errors import RunError
from rookery.reports import parse_genome_report


def test_a_report_is_read_whole() -> None:
    report = parse_genome_report(made_report())
    assert report.winner is not None
    assert (report.winner.name, report.winner.mean) == ("evolved", 0.91)
    assert report.rows[1].gain is None
    assert report.lineage[2].parents == ("founder-a", "founder-b")
    assert report.generations[2].num_tokens == 12347


def test_an_empty_report_has_no_winner_and_invents_no_numbers() -> None:
    report = parse_genome_report({})
    assert report.winner is None
    assert not (report.rows or report.generations or report.lineage or report.warnings)
    assert report.seconds is None


def test_null_is_the_same_as_a_missing_key() -> None:
    report = parse_genome_report({"rows": None, "run": None, "generations": [{"best": None}]})
    assert report.rows == ()
    assert report.generations[0].best is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_missing(value: float) -> None:
    report = parse_genome_report({"rows": [made_row("a", 0.5, mean=value, by_source={"t": value})]})
    assert report.rows[0].mean is None
    assert report.rows[0].by_source == {"t": None}


def test_half_a_surrogate_pair_can_be_written() -> None:
    report = parse_genome_report({"run": "a\ud800b"})
    assert report.run.encode() == b"a?b"


def test_unknown_keys_are_left_out() -> None:
    assert parse_genome_report({"run": "demo", "colour": 3}).run == "demo"


def test_sources_follow_the_tasksets_then_the_rows() -> None:
    rows = [made_row("a", 0.5, by_source={"late": 0.1, "add-two": 0.2, "label-kind": 0.3})]
    report = parse_genome_report(made_report(rows=rows))
    assert report.sources == ("label-kind", "add-two", "late")


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"kind": "eval"}, "kind is 'eval'"),
        ({"rows": "many"}, "rows is 'many'"),
        ({"rows": [{"mean": "high"}]}, "rows.0.mean is 'high'"),
    ],
)
def test_what_is_no_report_is_named(document: dict[str, object], named: str) -> None:
    with pytest.raises(RunError, match=named):
        parse_genome_report(document)  # type: ignore[arg-type]
