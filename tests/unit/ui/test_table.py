"""The rows of the terminal table."""

from ui.made import made_report, made_row

from rookery.reports import parse_genome_report
from rookery.ui.wording import GENOME_COLUMNS, GRPO_COLUMNS, report_rows


def test_rows_are_plain_strings_in_report_order() -> None:
    rows = report_rows(parse_genome_report(made_report()).rows)
    assert rows[0] == ("evolved", "0.910", "0.880 to 0.940", "+0.210 (+0.160 to +0.260)", "0")
    assert rows[1] == ("best founder", "0.700", "0.670 to 0.730", "", "0")
    assert [row[0] for row in rows] == [row["name"] for row in made_report()["rows"]]
    assert rows[5][4] == "2"
    assert {len(row) for row in rows} == {len(GENOME_COLUMNS), len(GRPO_COLUMNS)}


def test_a_row_that_was_not_measured_has_no_numbers() -> None:
    missing = {"mean": None, "low": None, "high": None, "gain": None}
    row = made_row("evolved", 0.9, **missing, num_failed=60)
    rows = report_rows(parse_genome_report({"rows": [row]}).rows)
    assert rows == [("evolved", "-", "-", "", "60")]


def test_an_unfinished_report_has_no_rows() -> None:
    assert report_rows(parse_genome_report({}).rows) == []
    assert report_rows(parse_genome_report(made_report(rows=[])).rows) == []
