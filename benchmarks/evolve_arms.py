"""What an evolve run and its baselines found, read from the run's events, and shown as a table."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rookery.loops.evolve.stages import Generated, Stages, read_stages
from rookery.runs import Run

__all__ = ["ARMS", "Arm", "Result", "read_result", "show_results", "to_document"]

ARMS = ("evolve", "best_of_n", "sequential")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One search of a run."""

    best: float
    """The first program's score where no child is better; NaN where nothing was asked yet."""
    num_iterations: int
    failures: Mapping[str, int]
    tokens: float
    """NaN where the model does not count them."""
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
    """Of a run that has ended, at its end or before."""
    with Run.view(folder) as view:
        found = {
            arm: read_stages(view, series="" if arm == ARMS[0] else arm)[0].values() for arm in arms
        }
    planned = [one.planned for one in found[ARMS[0]] if one.planned]
    first = min((plan.best_score for plan in planned), default=math.nan)
    read = {arm: _read_arm(list(stages), first=first) for arm, stages in found.items()}
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
        failures=dict(Counter(failure.kind for failure in failures)),
        tokens=sum(map(_tokens, generated)),
        seconds=max((one.decision.elapsed_s for one in decided if one.decision), default=0.0),
    )


def _tokens(generated: Generated) -> float:
    counts = (generated.prompt_tokens, generated.completion_tokens)
    return sum(math.nan if count is None else count for count in counts)


def to_document(results: Sequence[Result]) -> list[dict[str, object]]:
    """As JSON."""
    return [asdict(result) for result in results]


def show_results(results: Sequence[Result]) -> str:
    """A line for each arm of each run, then the means of each task."""
    head = ("task", "seed", "arm", "first", "best", "iterations", "tokens", "seconds", "failed")
    rows = [head, *_rows(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", *_means(results)])


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for name, arm in result.arms.items():
            reasons = ", ".join(f"{count} {kind}" for kind, count in sorted(arm.failures.items()))
            yield (
                result.task,
                str(result.seed),
                name,
                f"{result.first:.4f}",
                f"{arm.best:.4f}",
                f"{arm.num_iterations}{' cut' if result.is_cut else ''}",
                f"{arm.tokens:,.0f}",
                f"{arm.seconds:.0f}",
                f"{arm.num_failed}: {reasons}" if reasons else "0",
            )


def _means(results: Sequence[Result]) -> Iterator[str]:
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        improved = sum(result.arms["evolve"].best > result.first for result in own)
        means = ", ".join(
            f"{arm} {statistics.fmean(result.arms[arm].best for result in own):.4f}" for arm in ARMS
        )
        first = statistics.fmean(result.first for result in own)
        yield (
            f"{task}: first {first:.4f}; mean best of {len(own)} seeds: {means}; "
            f"evolve improved in {improved} of {len(own)}"
        )
