"""The comparison on the report tasks as plain strings, for a terminal table.

    for cells in genome_rows(report):
        table.add_row(*cells)       # under the names in COLUMNS

The page shows the same strings in the same order.
"""

from rookery.reports import GenomeReport
from rookery.ui import wording

__all__ = ["COLUMNS", "genome_rows"]

COLUMNS = ("method", "accuracy", "95 % interval", "gain over best founder", "failed")


def genome_rows(report: GenomeReport) -> list[tuple[str, ...]]:
    """One tuple per row, one string per column of COLUMNS; empty when nothing is reported yet.

    `("evolved", "0.910", "0.880 to 0.940", "+0.200 (+0.150 to +0.250)", "0")`
    """
    return [
        (
            row.name,
            wording.score(row.mean),
            wording.interval(row),
            wording.gain(row.gain),
            wording.count(row.num_failed),
        )
        for row in report.rows
    ]
