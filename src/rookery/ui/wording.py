"""Formats numbers and report rows as text, the same in the terminal and on the page.

score(0.91)             "0.910"                       count(12345)    "12,345"
interval(row)           "0.880 to 0.940"              duration(65.2)  "1 min 5 s"
gain(row.gain)          "+0.200 (+0.150 to +0.250)"   plural(1, "candidate")  "1 candidate"
tasks(240, 240)         "240 tasks"                   tasks(240, 30)  "30 questions (240 rows)"

A missing number is a hyphen, never a zero.
"""

from collections.abc import Sequence

from rookery.reports import Estimate, ModelRow, ReportRow, SampledRecord, TasksetRecord

__all__ = [
    "GENOME_COLUMNS",
    "GRPO_COLUMNS",
    "LOOP_COLUMNS",
    "MISSING",
    "count",
    "duration",
    "gain",
    "interval",
    "plural",
    "report_rows",
    "report_tasks",
    "sampled_columns",
    "sampled_rows",
    "score",
    "signed",
    "tasks",
]

MISSING = "-"


def score(value: float | None) -> str:
    """Mean reward with three decimals."""
    return MISSING if value is None else f"{_rounded(value):.3f}"


def signed(value: float | None) -> str:
    """Difference with three decimals, always signed."""
    return MISSING if value is None else f"{_rounded(value):+.3f}"


def interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return MISSING
    return f"{score(estimate.low)} to {score(estimate.high)}"


def gain(estimate: Estimate | None) -> str:
    """Difference with its interval; empty if there is nothing to compare with."""
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return signed(estimate.mean)
    return f"{signed(estimate.mean)} ({signed(estimate.low)} to {signed(estimate.high)})"


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Amount with its noun; the plural must end in s."""
    return f"{count(value)} {noun}" if value == 1 else f"{count(value)} {noun}s"


def tasks(num_tasks: int, num_questions: int, noun: str = "task") -> str:
    """Number of tasks; also of questions, if several tasks share one."""
    if num_questions in (0, num_tasks):
        return plural(num_tasks, noun)
    return f"{plural(num_questions, 'question')} ({plural(num_tasks, 'row')})"


def report_tasks(tasksets: Sequence[TasksetRecord], noun: str = "task") -> str:
    num_tasks = sum(taskset.num_report for taskset in tasksets)
    num_questions = sum(taskset.num_questions or taskset.num_report for taskset in tasksets)
    return tasks(num_tasks, num_questions, noun)


def duration(seconds: float | None) -> str:
    """Time in its two largest units; tenths of a second below a minute."""
    if seconds is None:
        return MISSING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{count(hours)} h {minutes} min"


def _mean_and_ends(estimate: Estimate) -> str:
    """`0.910 (0.880 to 0.940)`"""
    ends = interval(estimate)
    return score(estimate.mean) + ("" if ends == MISSING else f" ({ends})")


def _rounded(value: float) -> float:
    """Round to three decimals; adding zero turns -0.0 into 0.0, so "-0.000" never shows."""
    return round(value, 3) + 0.0


# Rows of the comparison on the report tasks, for a terminal table and for the page:
#
#     for cells in report_rows(report.rows):
#         table.add_row(*cells)       # under GENOME_COLUMNS or GRPO_COLUMNS


GENOME_COLUMNS = ("method", "accuracy", "95 % interval", "gain over best founder", "failed")
LOOP_COLUMNS = ("result", "reward", "95 % interval", "gain", "failed")
GRPO_COLUMNS = ("policy", "reward", "95 % interval", "gain over the start", "failed")


def report_rows(rows: Sequence[ReportRow]) -> list[tuple[str, ...]]:
    """One tuple of strings per row; empty if nothing is reported yet.

    `("evolved", "0.910", "0.880 to 0.940", "+0.200 (+0.150 to +0.250)", "0")`
    """
    return [
        (
            row.name,
            score(row.mean),
            interval(row),
            gain(row.gain),
            count(row.num_failed),
        )
        for row in rows
    ]


# Further answers sampled for each report task: pass@1, pass@k and the majority.


AnyRow = ReportRow | ModelRow


def sampled_columns(rows: Sequence[AnyRow]) -> tuple[str, ...]:
    """Columns of `sampled_rows`: `("policy", "pass@1", "pass@8", "majority of 8")`."""
    return ("policy", *(f"pass@{k}" for k in _shown(rows)), f"majority of {_shown(rows)[-1]}")


def sampled_rows(rows: Sequence[AnyRow]) -> list[tuple[str, ...]]:
    """One tuple per row with several answers per task; empty if none has them."""
    return [
        (
            row.name,
            *(_mean_and_ends(sampled.pass_at.get(k, Estimate())) for k in _shown(rows)),
            _mean_and_ends(sampled.majority),
        )
        for row in rows
        if (sampled := row.sampled) is not None
    ]


def _shown(rows: Sequence[AnyRow]) -> tuple[int, int]:
    """The `k` shown of pass@k: 1 and the number of answers. report.json has those between."""
    samples: list[SampledRecord] = [row.sampled for row in rows if row.sampled is not None]
    return 1, samples[0].num
