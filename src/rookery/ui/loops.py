"""Sentences, tables and costs of evolve, grpo and icm reports.

for cells in evolve_rows(report):
    table.add_row(*cells)       # under the names in EVOLVE_COLUMNS
"""

from rookery.reports import EvolveReport, GrpoReport, IcmReport, IcmRow
from rookery.reports.evolve import FinalistRow, TasksReport
from rookery.ui import wording
from rookery.ui.headline import ELSEWHERE, Verdict, gain_verdict

__all__ = [
    "EVOLVE_COLUMNS",
    "ICM_COLUMNS",
    "ICM_SENTENCES",
    "PROMPT_COLUMNS",
    "SETTING_COLUMNS",
    "WEAK_SUPPORT",
    "evolve_costs",
    "evolve_rows",
    "evolve_sentence",
    "gain_over_first",
    "grpo_context",
    "grpo_sentence",
    "grpo_verdict",
    "icm_contexts",
    "icm_costs",
    "icm_rows",
    "prompt_context",
    "prompt_rows",
    "prompt_sentence",
    "setting_rows",
    "six_digits",
    "verdict_words",
]


EVOLVE_COLUMNS = ("program", "score", "iteration", "model", "failed")
"""Columns that fit 80 characters."""


def evolve_sentence(report: EvolveReport) -> str:
    """The result in one sentence that claims no more than was measured."""
    if report.best is None or report.best.score is None:
        return "No result yet. The report is written when the search is over."
    gain = gain_over_first(report)
    if gain is None:
        return "The first program has no score to compare with."
    if gain <= 0:
        return "No program better than the first one was found."
    by = "" if not report.baselines else _beside_baselines(report)
    return f"Better than the first program by {wording.signed(gain)}.{by}"


PROMPT_COLUMNS = ("prompt", "search", "select", "report", "95 % interval", "gain")
PROMPT_SENTENCES: dict[Verdict, str] = {
    "better": "Better than the first prompt on tasks that the search never saw. The whole 95 % "
    "interval of the gain lies above zero.",
    "unclear": "Not distinguishable from the first prompt. The 95 % interval of the gain includes "
    "zero.",
    "worse": "Worse than the first prompt. The whole 95 % interval of the gain lies below zero.",
    "unmeasured": "No gain over the first prompt was measured.",
    "unfinished": "No result yet. The report tasks are read once, when the search is over.",
}


def prompt_sentence(report: EvolveReport, tasks: TasksReport) -> str:
    if report.first is not None and tasks.chosen == report.first.id:
        return "No prompt was chosen over the first one."
    return PROMPT_SENTENCES[gain_verdict(tasks.rows[0].gain if tasks.rows else None)]


def prompt_context(tasks: TasksReport) -> str:
    """Tasks and candidates behind the reported number."""
    return (
        f"Found on {wording.plural(tasks.num_search, 'search task')}, chosen among "
        f"{wording.plural(len(tasks.finalists), 'prompt')} on "
        f"{wording.plural(tasks.taskset.num_select, 'select task')}, measured once on "
        f"{wording.report_tasks([tasks.taskset], 'report task')}."
    )


def prompt_rows(report: EvolveReport, tasks: TasksReport) -> list[tuple[str, ...]]:
    """Rows under PROMPT_COLUMNS: the chosen prompt and the first one."""
    first = "" if report.first is None else report.first.id
    finalists = {row.id: row for row in tasks.finalists}
    rows: list[tuple[str, ...]] = []
    for row, id in zip(tasks.rows, (tasks.chosen, first), strict=False):
        finalist = finalists.get(id, FinalistRow())
        scores = (wording.score(finalist.search), wording.score(finalist.select))
        ends = wording.interval(row)
        rows.append((row.name, *scores, wording.score(row.mean), ends, wording.gain(row.gain)))
    return rows


def evolve_rows(report: EvolveReport) -> list[tuple[str, ...]]:
    """Rows under EVOLVE_COLUMNS: the first program, the best, the baselines."""
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
    """Six significant digits: scores have any size, and evolution improves the last digits."""
    return wording.MISSING if value is None else f"{value:.6g}"


def gain_over_first(report: EvolveReport) -> float | None:
    """Score of the best program minus that of the first; None if either has no score."""
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
    """Resources used: ["50 iterations", "12,345 tokens", "0.12 USD", "2 min 0 s"]."""
    costs = [wording.plural(report.num_iterations, "iteration")]
    tokens = report.tokens
    if tokens.prompt is not None and tokens.completion is not None:
        costs.append(wording.plural(tokens.prompt + tokens.completion, "token"))
    if trained := sum(row.tokens for row in report.learned):
        costs.append(wording.plural(trained, "token") + " trained on")
    if report.tasks is not None:
        num = report.tasks.num_rollouts + report.tasks.num_final_rollouts
        costs.append(wording.plural(num, "rollout"))
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


SETTING_COLUMNS = ("setting", "seeds", "select", "report", "95 % interval", "gain over the start")


def grpo_sentence(report: GrpoReport) -> str:
    """The result in one sentence that claims no more than was measured."""
    return {
        "better": "Better than the start. The whole 95 % interval of the gain lies above zero: "
        "chance alone is an unlikely explanation.",
        "unclear": "Not distinguishable from chance. The 95 % interval of the gain includes zero.",
        "worse": "Worse than the start. The whole 95 % interval of the gain lies below zero.",
        "unmeasured": "No gain over the start was measured.",
        "unfinished": "No result yet. The report tasks are read once, when the training is over."
        if report.chosen_step is None or any(each.num_report for each in report.tasksets)
        else ELSEWHERE,
    }[grpo_verdict(report)]


def grpo_context(report: GrpoReport) -> str:
    """Measured weights and report tasks; empty before the weights are chosen."""
    if report.chosen_step is None:
        return ""
    measured = _how_measured(report)
    return (
        f"The weights after step {report.chosen_step}, chosen among "
        f"{wording.plural(len(report.checkpoints), 'checkpoint')} on the select tasks; measured "
        f"once on {wording.report_tasks(report.tasksets, 'report task')}"
        f"{', ' + measured if measured else ''}."
    )


def _how_measured(report: GrpoReport) -> str:
    """`greedily`, `at temperature 0.7`, or both; empty if the report has no temperature."""
    temperatures = dict.fromkeys(taskset.temperature for taskset in report.tasksets)
    return " and ".join(
        f"at temperature {temperature:g}" if temperature else "greedily"
        for temperature in temperatures
        if temperature is not None
    )


def grpo_verdict(report: GrpoReport) -> Verdict:
    """Verdict on the trained policy; `unfinished` before there is one."""
    return "unfinished" if report.trained is None else gain_verdict(report.trained.gain)


def setting_rows(report: GrpoReport) -> list[tuple[str, ...]]:
    """Rows under SETTING_COLUMNS, one per setting of a sweep; empty without a sweep."""
    return [
        (
            row.name,
            wording.count(row.num_seeds),
            wording.score(row.select),
            wording.score(row.mean),
            wording.interval(row),
            wording.gain(row.gain),
        )
        for row in (() if report.sweep is None else report.sweep.settings)
    ]


ICM_COLUMNS = ("method", "labelled", "balance", "broken", "utility", "true", "95 % interval")
"""Columns that fit 80 characters."""
WEAK_SUPPORT = 0.5
"""Below this strength, most influences between labels do not agree with the result."""

ICM_SENTENCES: dict[str, str] = {
    "coherent": "Coherent. Every item is labelled, and no other labels that were found are as "
    "good. At least three labels of four follow from the others, and labels support one another "
    "more than in a random model.",
    "partial": "Not finished: some items have no label.",
    "collapsed": "Collapsed: nearly all items of a batch have the same label. These labels say "
    "nothing.",
    "inconsistent": "Inconsistent: labels break the constraints.",
    "opposite": "Opposite: what a label means in one batch is the opposite in another.",
    "inverse": "The inverse concept: the labels are mostly the opposite of the true ones.",
    "chance": "No better than chance against the true labels.",
    "ambiguous": "Ambiguous: other labels are as coherent as these.",
    "frustrated": "Frustrated: many items are predicted to have another label than they have.",
    "unsupported": "Unsupported: the labels are no more coherent than in a random model.",
    "": "No result yet.",
}


def icm_contexts(report: IcmReport) -> list[str]:
    """Caveats for a reader of the labels."""
    support = report.support
    said = []
    if support is not None and support.gain is not None and support.random_gain is not None:
        found_gain, random = (round(gain, 1) + 0.0 for gain in (support.gain, support.random_gain))
        said.append(
            f"The labels raise one another's log-odds by {found_gain:.1f} standard deviations "
            f"of what random labels do; the best labels of a random model reach {random:.1f}."
        )
    unknown = all(row.accuracy is None for row in report.rows)
    missing = " No true labels were given to compare with." if unknown else ""
    return [
        *said,
        f"Coherence is not truth: labels can predict one another well and be wrong.{missing}",
    ]


def icm_costs(report: IcmReport) -> list[str]:
    """["100 tokens for the search", "50 for the comparison", "12.0 s"]."""
    tokens = report.tokens
    if not tokens.computed:
        return []
    costs = [
        f"{wording.plural(tokens.computed, 'token')} for the search",
        f"{wording.count(tokens.baselines)} for the comparison",
    ]
    return [*costs, wording.duration(report.seconds)] if report.seconds else costs


def verdict_words(report: IcmReport) -> str:
    """`coherent, strength 0.94 of 1`; a strength below WEAK_SUPPORT is called weak."""
    support = report.support
    if support is None or support.strength is None:
        return report.verdict
    weak = "weak, " if report.verdict == "coherent" and support.strength < WEAK_SUPPORT else ""
    return f"{report.verdict}, {weak}strength {support.strength:.2f} of 1"


def icm_rows(report: IcmReport) -> list[tuple[str, ...]]:
    """Rows under ICM_COLUMNS.

    `("icm", "16", "8 / 8", "0", "64.612", "1.000", "0.676 to 1.000")`
    """
    return [
        (
            row.name,
            wording.count(row.num_labelled),
            _balance(row),
            wording.count(row.num_violated),
            wording.score(row.utility),
            wording.score(row.accuracy),
            _interval(row),
        )
        for row in report.rows
    ]


def _balance(row: IcmRow) -> str:
    return " / ".join(str(count) for count in row.balance.values()) or wording.MISSING


def _interval(row: IcmRow) -> str:
    if row.low is None or row.high is None:
        return wording.MISSING
    return f"{wording.score(row.low)} to {wording.score(row.high)}"
