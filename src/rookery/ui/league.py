"""Sentences and tables of a league: the best entrant, how certain that is, and the costs.

league_sentence(report)    "sft is better than the model as it is: ..."
league_rows(report)        one row per entrant, under COLUMNS
pair_table(report)         columns and rows of the pairwise differences
"""

from collections.abc import Sequence

from rookery.reports import LeagueReport, LeagueRow
from rookery.ui import wording

__all__ = [
    "BASE",
    "COLUMNS",
    "COST_COLUMNS",
    "cost_rows",
    "league_contexts",
    "league_rows",
    "league_sentence",
    "league_verdict",
    "pair_table",
    "setting_lines",
]

BASE = "base"
COLUMNS = ("entrant", "accuracy", "95 % interval", "gain over base", "below the best")
COST_COLUMNS = ("entrant", "drawn", "trained", "time", "seeds")
SURE = "*"
"""Marks a difference whose interval excludes zero."""


def league_verdict(report: LeagueReport) -> str:
    """`better` if the interval of the best entrant's gain over the untouched model is above 0."""
    best = _best(report)
    if best is None:
        return "unfinished"
    gain = best.gain
    return "better" if gain is not None and gain.low is not None and gain.low > 0 else "unclear"


def league_sentence(report: LeagueReport) -> str:
    best = _best(report)
    if best is None:
        return "No result yet. The report tasks are read once, when all entrants have ended."
    if best.name == BASE:
        return "No entrant is better than the model as it is."
    if league_verdict(report) != "better":
        return (
            f"{best.name} is the highest, and not distinguishable from the model as it is: the "
            "95 % interval of its gain includes zero."
        )
    sentence = (
        f"{best.name} is better than the model as it is: the whole 95 % interval of its gain lies "
        "above zero."
    )
    equals = [row.name for row in report.rows if row is not best and not _is_below(row)]
    if equals:
        return f"{sentence} It cannot be told apart from {_listed(equals)}."
    others = "entrant" if all(row.mean is not None for row in report.rows) else "measured entrant"
    return f"{sentence} It is better than every other {others} too."


def league_contexts(report: LeagueReport) -> list[str]:
    """Budget and number of report tasks, and the entrants left out with their reasons."""
    measured = wording.tasks(report.num_tasks, report.num_questions, "report task")
    lines = [f"Each under {report.budget}; measured once on {measured} that no entrant has seen."]
    lines += [f"{one.name} is left out. {one.reason}" for one in report.left_out]
    return lines if report.rows else []


def _best(report: LeagueReport) -> LeagueRow | None:
    best = report.rows[0] if report.rows else None
    return best if best is not None and best.mean is not None else None


def _is_below(row: LeagueRow) -> bool:
    """Whether an entrant is worse than the best; also true without a mean."""
    return row.lead is None or (row.lead.high is not None and row.lead.high < 0)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def league_rows(report: LeagueReport) -> list[tuple[str, ...]]:
    """`("sft", "0.800", "0.700 to 0.880", "+0.300 (+0.200 to +0.400)", "")`"""
    return [
        (
            row.name,
            wording.score(row.mean),
            wording.interval(row),
            wording.gain(row.gain),
            wording.gain(row.lead),
        )
        for row in report.rows
    ]


def cost_rows(report: LeagueReport) -> list[tuple[str, ...]]:
    """Average cost of a seed: `("sft", "0", "1,200", "12.3 s", "0.790 0.800 0.810")`"""
    return [
        (
            row.name,
            wording.count(row.spent.drawn_tokens),
            wording.count(row.spent.trained_tokens),
            wording.duration(row.seconds),
            " ".join(wording.score(run.mean) for run in row.runs),
        )
        for row in report.rows
        if row.runs
    ]


def setting_lines(report: LeagueReport) -> list[str]:
    """Training and settings of each entrant: `sft: trained on the answers; rank 2`."""
    return [
        f"{row.name}: {row.what}; {row.settings or 'default settings'}"
        for row in report.rows
        if row.runs
    ]


def pair_table(report: LeagueReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: the lead of each entrant over each lower-ranked one. `*` marks a 95 %
    interval that excludes zero."""
    names = [row.name for row in report.rows if row.mean is not None]
    differences = {(pair.first, pair.second): pair.difference for pair in report.pairs}
    rows = []
    for place, name in enumerate(names[:-1]):
        cells = [""] * place
        for other in names[place + 1 :]:
            difference = differences.get((name, other))
            if difference is None:
                cells.append(wording.MISSING)
                continue
            low, high = difference.low, difference.high
            is_sure = low is not None and high is not None and (low > 0 or high < 0)
            cells.append(wording.signed(difference.mean) + (SURE if is_sure else " "))
        rows.append((name, *cells))
    return ("above", *names[1:]), rows
