"""What is said of a training from rewards: its verdict, its sentence, how it was measured."""

from rookery.reports import GrpoReport
from rookery.ui import wording
from rookery.ui.headline import Verdict, gain_verdict

__all__ = ["SETTING_COLUMNS", "grpo_context", "grpo_sentence", "grpo_verdict", "setting_rows"]

SETTING_COLUMNS = ("setting", "seeds", "select", "report", "95 % interval", "gain over the start")


def grpo_sentence(report: GrpoReport) -> str:
    """The result in one sentence that says what it does and does not show."""
    return {
        "better": "Better than the start. The whole 95 % interval of the gain lies above zero: "
        "chance alone is an unlikely explanation.",
        "unclear": "Not distinguishable from chance. The 95 % interval of the gain includes zero.",
        "worse": "Worse than the start. The whole 95 % interval of the gain lies below zero.",
        "unmeasured": "No gain over the start was measured.",
        "unfinished": "No result yet. The report tasks are read once, when the training is over.",
    }[grpo_verdict(report)]


def grpo_context(report: GrpoReport) -> str:
    """Which weights were measured, and on what; empty before they are chosen."""
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
    """`greedily`, `at temperature 0.7`, or both; empty where the report does not tell."""
    found = dict.fromkeys(taskset.temperature for taskset in report.tasksets)
    return " and ".join(
        f"at temperature {temperature:g}" if temperature else "greedily"
        for temperature in found
        if temperature is not None
    )


def grpo_verdict(report: GrpoReport) -> Verdict:
    """Of the trained policy; `unfinished` before there is one."""
    return "unfinished" if report.trained is None else gain_verdict(report.trained.gain)


def setting_rows(report: GrpoReport) -> list[tuple[str, ...]]:
    """The settings of a sweep as strings under SETTING_COLUMNS; none without a sweep."""
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
