"""The page and the sentence of a training from rewards.

path.write_text(render_grpo_page(report), encoding="utf-8")
"""

from collections.abc import Sequence

from rookery.reports import GrpoReport, TrainStepRecord
from rookery.ui import wording
from rookery.ui.page import render_template

__all__ = ["SETTING_COLUMNS", "grpo_sentence", "render_grpo_page", "setting_rows"]

PANELS = {
    "train/loss": "Loss",
    "train/kl": "KL to the reference",
    "train/entropy": "Entropy",
    "train/clip_fraction": "Clip fraction",
    "train/clip_low": "Clipped below",
    "train/clip_high": "Clipped above",
    "train/ratio": "Mean ratio",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "grpo/logprob_gap": "Engine/trainer gap, nats",
    "grpo/logprob_drift": "Change since drawn, nats",
    "grpo/staleness": "Staleness, steps",
    "grpo/num_equal_groups": "Groups of equal rewards",
    "grpo/num_failed_rollouts": "Failed rollouts",
}
"""The small charts, each drawn when the run has the metric and it changes."""

SAME = 1e-6
"""Values of a metric that differ by less, relative to the largest, are rounding: no chart."""

SHOWN_EXAMPLES = 40
"""Completions on the page, of steps spread over the run; report.json has them all."""


def render_grpo_page(report: GrpoReport) -> str:
    """The page of a report; what is not there yet is named as missing."""
    measured = {name for step in report.steps for name in step.metrics}
    constants = {
        name: value
        for name in PANELS
        if name in measured and (value := _constant(report.steps, name)) is not None
    }
    stages = sorted(name for name in measured if name.startswith("time/"))
    every = max(1, -(-len(report.steps) // (SHOWN_EXAMPLES // 2)))
    return render_template(
        "grpo.html.jinja",
        scripts=("frame.js", "grpo.js", "draw.js"),
        report=report,
        verdict=_verdict(report),
        sentence=grpo_sentence(report),
        trained=report.trained,
        measured=_how_measured(report),
        panels={n: label for n, label in PANELS.items() if n in measured and n not in constants},
        constants={PANELS[name]: f"{value:.4g}" for name, value in constants.items()},
        stages=stages,
        setting_columns=SETTING_COLUMNS,
        setting_rows=setting_rows(report),
        examples=[(s.step, e) for s in report.steps[::-every] for e in s.examples],
        document=report.model_dump(mode="json", exclude={"steps": {"__all__": {"examples"}}})
        | {"stages": stages},
    )


def grpo_sentence(report: GrpoReport) -> str:
    """The result in one sentence that says what it does and does not show."""
    return {
        "better": "Better than the start. The whole 95 % interval of the gain lies above zero: "
        "chance alone is an unlikely explanation.",
        "unclear": "Not distinguishable from chance. The 95 % interval of the gain includes zero.",
        "worse": "Worse than the start. The whole 95 % interval of the gain lies below zero.",
        "unmeasured": "No gain over the start was measured.",
        "unfinished": "No result yet. The report tasks are read once, when the training is over.",
    }[_verdict(report)]


SETTING_COLUMNS = ("setting", "seeds", "select", "report", "95 % interval", "gain over the start")


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


def _how_measured(report: GrpoReport) -> str:
    """`greedily`, `at temperature 0.7`, or both; empty where the report does not tell."""
    found = dict.fromkeys(taskset.temperature for taskset in report.tasksets)
    return " and ".join(
        f"at temperature {temperature:g}" if temperature else "greedily"
        for temperature in found
        if temperature is not None
    )


def _constant(steps: Sequence[TrainStepRecord], name: str) -> float | None:
    """What a metric is in every step that has it; None when it changes or was never a number."""
    values = [value for step in steps if (value := step.metrics.get(name)) is not None]
    if not values or max(values) - min(values) > SAME * max(map(abs, values)):
        return None
    return values[0]


def _verdict(report: GrpoReport) -> str:
    if report.trained is None:
        return "unfinished"
    gain = report.trained.gain
    if gain is None or gain.low is None or gain.high is None:
        return "unmeasured"
    if gain.low > 0:
        return "better"
    return "worse" if gain.high < 0 else "unclear"
