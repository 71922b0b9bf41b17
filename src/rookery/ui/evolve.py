"""The sentence, the table and the costs of an evolution of programs.

for cells in evolve_rows(report):
    table.add_row(*cells)       # under the names in COLUMNS
"""

from rookery.reports import EvolveReport
from rookery.ui import wording

__all__ = [
    "COLUMNS",
    "evolve_costs",
    "evolve_rows",
    "evolve_sentence",
    "gain_over_first",
    "six_digits",
]

COLUMNS = ("program", "score", "iteration", "model", "failed")
"""Of the table: what fits 80 characters."""


def evolve_sentence(report: EvolveReport) -> str:
    """The result in a sentence that says no more than was measured."""
    if report.best is None or report.best.score is None:
        return "No result yet: no program has a score."
    gain = gain_over_first(report)
    if gain is None:
        return "The first program has no score to compare with."
    if gain <= 0:
        return "No program better than the first one was found."
    by = "" if not report.baselines else _beside_baselines(report)
    return f"Better than the first program by {wording.signed(gain)}.{by}"


def evolve_rows(report: EvolveReport) -> list[tuple[str, ...]]:
    """One tuple per row, one string per column of COLUMNS: the first, the best, the baselines."""
    rows: list[tuple[str, ...]] = []
    for name, row in (("first program", report.first), ("best program", report.best)):
        if row is not None:
            rows.append((name, six_digits(row.score), str(row.iteration), row.model, ""))
    if rows and report.num_iterations:
        failed = f"{wording.count(report.num_failed)} of {wording.count(report.num_iterations)}"
        rows[-1] = (*rows[-1][:-1], failed)
    for baseline in report.baselines:
        failed = f"{wording.count(baseline.num_failed)} of {wording.count(baseline.num_iterations)}"
        rows.append((baseline.name, six_digits(baseline.best), "", "", failed))
    return rows


def six_digits(value: float | None) -> str:
    """Six digits: scores have any size, and the last digits are what an evolution is about."""
    return wording.MISSING if value is None else f"{value:.6g}"


def gain_over_first(report: EvolveReport) -> float | None:
    """What the best program scores more than the first; None where one has no score."""
    if report.best is None or report.first is None:
        return None
    if report.best.score is None or report.first.score is None:
        return None
    return report.best.score - report.first.score


def _beside_baselines(report: EvolveReport) -> str:
    assert report.best is not None and report.best.score is not None
    best = report.best.score
    scores = [(each.best, each.name) for each in report.baselines if each.best is not None]
    as_good = [f"{name} ({six_digits(score)})" for score, name in scores if score >= best]
    if as_good:
        return f" As good or better with as much to spend: {', '.join(as_good)}."
    if not scores:
        return " No baseline has a score."
    score, name = max(scores)
    return (
        f" The best baseline with as much to spend, {name}, reached {six_digits(score)}, which is "
        f"{wording.signed(score - best)}. One run of each tells nothing of chance: repeat it with "
        "other seeds before you call one better."
    )


def evolve_costs(report: EvolveReport) -> list[str]:
    """What the run used: ["50 iterations", "12,345 tokens", "0.12 USD", "2 min 0 s"]."""
    costs = [wording.plural(report.num_iterations, "iteration")]
    tokens = report.tokens
    if tokens.prompt is not None and tokens.completion is not None:
        costs.append(wording.plural(tokens.prompt + tokens.completion, "token"))
    if trained := sum(row.tokens for row in report.learned):
        costs.append(wording.plural(trained, "token") + " trained on")
    if report.usd is not None:
        costs.append(f"{report.usd:.2f} USD")
    if report.seconds is not None:
        costs.append(wording.duration(report.seconds))
    if report.evaluation_seconds is not None:
        costs.append(f"{wording.duration(report.evaluation_seconds)} of evaluations")
    if report.num_tuning_evaluations:
        costs.append(
            wording.plural(report.num_tuning_evaluations, "evaluation") + " to tune numbers"
        )
    if report.num_workers_lost:
        costs.append(f"{wording.plural(report.num_workers_lost, 'worker')} lost and replaced")
    return costs
