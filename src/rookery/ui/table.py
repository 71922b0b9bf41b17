"""The comparison on the report tasks as plain strings, for a terminal table.

    for cells in report_rows(report.rows):
        table.add_row(*cells)       # under the names in GENOME_COLUMNS or GRPO_COLUMNS

The page shows the same strings in the same order.
"""

from collections.abc import Sequence

from rookery.reports import ReportRow
from rookery.ui import wording

__all__ = ["GENOME_COLUMNS", "GRPO_COLUMNS", "report_rows"]

GENOME_COLUMNS = ("method", "accuracy", "95 % interval", "gain over best founder", "failed")
GRPO_COLUMNS = ("policy", "reward", "95 % interval", "gain over the start", "failed")


def report_rows(rows: Sequence[ReportRow]) -> list[tuple[str, ...]]:
    """One tuple per row, one string per column; empty when nothing is reported yet.

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
        for row in rows
    ]
