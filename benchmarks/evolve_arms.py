"""Reads the results of an evolve run and its baselines from its events, and prints a table."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rookery.loops.evolve.stages import Generated, Stages, read_stages
from rookery.runs import Run

__all__ = [
    "ARMS",
    "LEARN",
    "WITH_TUNE",
    "Arm",
    "Result",
    "read_result",
    "show_results",
    "to_document",
]

ARMS = ("evolve", "best_of_n", "sequential")
WITH_TUNE = "+tune"
LEARN = "evolve+learn"
SCALES = {"circle_packing": 2.635}
"""Factor that turns a score into the value of the table, here the sum of radii."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One search of a run."""

    best: float
    """Best score, at least that of the first program; NaN before the first iteration."""
    num_iterations: int
    num_evaluations: int
    """Evaluations, including those that tuned numbers."""
    failures: Mapping[str, int]
    tokens: float
    """Tokens, including trained ones; NaN if the model does not count them."""
    seconds: float

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    task: str
    seed: int
    is_cut: bool
    first: float
    arms: Mapping[str, Arm]

    def named(self, task: str, *, seed: int, is_cut: bool) -> "Result":
        return replace(self, task=task, seed=seed, is_cut=is_cut)


def read_result(folder: Path, *, arms: Sequence[str]) -> Result:
    """Read the result of a finished or interrupted run."""
    with Run.view(folder) as view:
        found = {arm: read_stages(view, series=_series(arm))[0].values() for arm in arms}
        trained = sum(event.payload["num_tokens"] for event in view.events("learned"))
    planned = [one.planned for one in found[arms[0]] if one.planned]
    first = min((plan.best_score for plan in planned), default=math.nan)
    read = {arm: _read_arm(list(stages), first=first) for arm, stages in found.items()}
    own = read[arms[0]]
    read[arms[0]] = replace(own, tokens=own.tokens + trained)
    return Result(task="", seed=0, is_cut=False, first=first, arms=read)


def _read_arm(stages: Sequence[Stages], *, first: float) -> Arm:
    decided = [one for one in stages if one.decision]
    failures = [one.decision.failure for one in decided if one.decision and one.decision.failure]
    scores = [
        one.evaluated.metrics["combined_score"]
        for one in decided
        if one.evaluated and one.decision and not one.decision.failure
    ]
    generated = [one.generated for one in stages if one.generated]
    return Arm(
        best=max([first, *scores]) if decided else math.nan,
        num_iterations=len(decided),
        num_evaluations=sum(_evaluations(one) for one in stages),
        failures=dict(Counter(failure.kind for failure in failures)),
        tokens=sum(map(_tokens, generated)),
        seconds=max((one.decision.elapsed_s for one in decided if one.decision), default=0.0),
    )


def _series(arm: str) -> str:
    return "" if arm.startswith(ARMS[0]) else arm.replace(WITH_TUNE, "-tune")


def _evaluations(stages: Stages) -> int:
    evaluated = stages.evaluated
    return (evaluated.num_tuning or bool(evaluated.seconds)) if evaluated else 0


def _tokens(generated: Generated) -> float:
    counts = (generated.prompt_tokens, generated.completion_tokens)
    return sum(math.nan if count is None else count for count in counts)


def to_document(results: Sequence[Result]) -> list[dict[str, object]]:
    """Results as JSON values."""
    return [asdict(result) for result in results]


def show_results(results: Sequence[Result]) -> str:
    """Table with a row per task and search: mean best score and mean costs."""
    head = ("task", "search", "mean best", "each seed", "first", "iterations", "evaluations",
            "tokens", "failed", "minutes", "failures")  # fmt: skip
    rows = [head, *_rows(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join(line.rstrip() for line in lines)


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    names = dict.fromkeys((result.task, arm) for result in results for arm in result.arms)
    for task, name in names:
        own = [one for one in results if one.task == task and name in one.arms]
        arms = [one.arms[name] for one in own]
        scale = SCALES.get(task, 1.0)
        num_failed = sum(arm.num_failed for arm in arms)
        num = sum(arm.num_iterations for arm in arms)
        failures = sum((Counter(arm.failures) for arm in arms), Counter[str]())
        yield (
            task,
            name,
            f"{scale * statistics.fmean(arm.best for arm in arms):.4f}",
            ", ".join(
                f"{scale * arm.best:.4f}{' cut' if one.is_cut else ''}"
                for one, arm in zip(own, arms, strict=True)
            ),
            f"{scale * statistics.fmean(one.first for one in own):.4f}",
            f"{num / len(arms):.0f}",
            f"{statistics.fmean(arm.num_evaluations for arm in arms):,.0f}",
            f"{statistics.fmean(arm.tokens for arm in arms):,.0f}",
            f"{num_failed / num:.0%}" if num else "-",
            f"{statistics.fmean(arm.seconds for arm in arms) / 60:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in failures.most_common(5)),
        )
