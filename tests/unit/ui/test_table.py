"""The rows of the terminal table."""

from ui.made import made_report, made_row

from rookery.reports import parse_genome_report
from rookery.ui.table import COLUMNS, genome_rows


def test_rows_are_plain_strings_in_report_order() -> None:
    rows = genome_rows(parse_genome_report(made_report()))
    assert rows[0] == ("evolved", "0.910", "0.880 to 0.940", "+0.210 (+0.160 to +0.260)", "0")
    assert rows[1] == ("best founder", "0.700", "0.670 to 0.730", "", "0")
    assert [row[0] for row in rows] == [row["name"] for row in made_report()["rows"]]
    assert rows[5][4] == "2"
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_a_row_that_was_not_measured_has_no_numbers() -> None:
    missing = {"mean": None, "low": None, "high": None, "gain": None}
    assert genome_rows(
        parse_genome_report({"rows": [made_row("evolved", 0.9, **missing, num_failed=60)]})
    ) == [("evolved", "-", "-", "", "60")]


def test_an_unfinished_report_has_no_rows() -> None:
    assert genome_rows(parse_genome_report({})) == []
    assert genome_rows(parse_genome_report(made_report(rows=[]))) == []
