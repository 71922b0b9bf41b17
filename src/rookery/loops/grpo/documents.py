"""The records of a grpo run: its steps, the report with warnings, and the `trained` folder."""

import asyncio
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

from rookery.loops.comparison import (
    describe_taskset,
    warn_of_batches,
    warn_of_failed_tasks,
    warn_of_small_samples,
)
from rookery.loops.grpo.batch import Batch, DrawnGroup, DrawnRollout
from rookery.loops.grpo.checkpoints import Checkpoints, Selection
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.group_source import BATCH
from rookery.ports import Engine, Observer
from rookery.reports import (
    CheckpointRecord,
    GrpoReport,
    ReportRow,
    SpentRecord,
    SweepRecord,
    TrainStepRecord,
    describe_task,
)
from rookery.runs import SET_ASIDE, NewEvent, Run
from rookery.tasks.taskset import Taskset
from rookery.types import Task, TokenIds, TokenSequence

__all__ = [
    "DRAWN",
    "TRAINED",
    "Example",
    "GrpoSummary",
    "Step",
    "StepLog",
    "count_trained",
    "write_report",
]


STEP, GAP = "step", "gap"
DRAWN, TRAINED = "grpo/num_drawn_tokens", "grpo/num_trained_tokens"
SHOWN_TOKENS = 256
"""Tokens kept per completion with gaps: a few kilobytes per step."""
SHOWN_CHARACTERS = 600
"""Characters shown per completion in a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion to show."""

    task: str
    text: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    step: int
    model_step: int
    """The step whose weights drew the answers."""
    positions: tuple[int, ...]
    """Positions of the trained groups in the task order."""
    metrics: Mapping[str, float]
    """`reward/mean`, `train/loss`, `grpo/logprob_gap`, `time/train_s`, ..."""
    examples: tuple[Example, ...]
    """The best and the worst answer of the first group."""


class StepLog:
    """Records each step in the run, as an event and a line of metrics."""

    def __init__(
        self, run: Run, *, observer: Observer[Step], decode: Callable[[TokenIds], str] | None = None
    ) -> None:
        self._run = run
        self.observer = observer
        self._decode = decode or _numbers

    async def record(
        self, batch: Batch, metrics: Mapping[str, float], *, gaps: Sequence[Sequence[float]] = ()
    ) -> None:
        """Record a step, with the token gaps of its examples; `gaps` has one entry per row. Steps
        that a resumed run repeats keep their first record."""
        step = Step(
            step=batch.step,
            model_step=batch.model_step,
            positions=tuple(group.position for group in batch.groups),
            metrics={**_batch_metrics(batch), **metrics},
            examples=_examples(batch.groups[0]) if batch.groups else (),
        )
        key = str(step.step)
        news = [NewEvent(kind=STEP, key=key, payload=asdict(step), first_wins=True)]
        if gaps:
            payload = await asyncio.to_thread(_gap_payload, batch, gaps, self._decode)
            news.append(NewEvent(kind=GAP, key=key, payload=payload, first_wins=True))
        await self._run.append_many(news)
        self._run.log_metrics(step.step, step.metrics)
        self.observer.on_step(step)

    def read(self) -> Iterator[TrainStepRecord]:
        """Yield every recorded step, in order."""
        return (TrainStepRecord.model_validate(event.payload) for event in self._run.events(STEP))


def _batch_metrics(batch: Batch) -> dict[str, float]:
    counts = batch.counts
    metrics = {
        "grpo/num_groups": float(len(batch.groups)),
        "grpo/num_equal_groups": float(counts.num_equal),
        "grpo/num_failed_rollouts": float(counts.num_failed),
        "grpo/num_rollouts": float(counts.num_rollouts),
        DRAWN: float(counts.num_tokens),
        TRAINED: float(count_trained(batch)),
        "grpo/staleness": float(batch.step - batch.model_step),
    }
    if counts.mean_reward is not None:
        metrics["reward/mean"] = counts.mean_reward
    rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
    if rewards:
        metrics["reward/std"] = pstdev(rewards)
    return metrics | {f"game/{name}": value for name, value in counts.metrics.items()}


def count_trained(batch: Batch) -> int:
    """Return the number of answer tokens that the batch trains on."""
    return sum(rollout.num_drawn for group in batch.groups for rollout in group.rollouts)


def _examples(group: DrawnGroup) -> tuple[Example, ...]:
    return tuple(
        Example(task=group.task, text=rollout.text[:SHOWN_CHARACTERS], reward=rollout.reward)
        for rollout in _best_and_worst(group)
    )


def _best_and_worst(group: DrawnGroup) -> tuple[DrawnRollout, DrawnRollout]:
    ordered = sorted(group.rollouts, key=lambda rollout: rollout.reward)
    return ordered[-1], ordered[0]


def _gap_payload(
    batch: Batch, gaps: Sequence[Sequence[float]], decode: Callable[[TokenIds], str]
) -> dict[str, Any]:
    """Return the examples as pieces of one token each, with each token's gap in nats."""
    group, rows = batch.groups[0], iter(gaps)
    pieces = {id(rollout): [next(rows) for _ in rollout.sequences] for rollout in group.rollouts}
    return {
        "task": group.task,
        "is_fresh": batch.model_step == batch.step,
        "answers": [
            [piece for both in zip(shown.sequences, pieces[id(shown)], strict=True)
             for piece in _pieces(*both, decode)][:SHOWN_TOKENS]
            for shown in _best_and_worst(group)
        ],
    }  # fmt: skip


def _pieces(
    sequence: TokenSequence, gaps: Sequence[float], decode: Callable[[TokenIds], str]
) -> list[tuple[str, float | None]]:
    """Return pairs such as `(" four", 1.2e-06)`. A split character is at its last token."""
    drawn = tuple(sequence.tokens[place] for place in sequence.drawn[:SHOWN_TOKENS])
    texts = [decode(drawn[:end]) for end in range(len(drawn) + 1)]
    ends = [len(text.rstrip("\ufffd")) for text in texts]
    pieces = [text[start:end] for start, text, end in zip(ends, texts[1:], ends[1:], strict=False)]
    shown = [float(f"{gap:.2g}") if math.isfinite(gap) else None for gap in gaps]
    return list(zip(pieces, shown, strict=False))


def _numbers(tokens: TokenIds) -> str:
    """Show token ids if no detokenizer is known."""
    return "".join(f" {token}" for token in tokens)


FEW_GROUPS = 0.5
"""A warning is issued if a smaller share of the run's groups had rewards that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSummary:
    """The outcome of a run, as input of its report."""

    config: GrpoConfig
    base: str
    engine: Engine
    tasksets: Sequence[Taskset]
    checkpoints: Checkpoints
    selection: Selection
    log: StepLog
    rows: Sequence[ReportRow]
    stop_reason: str = ""
    """The budget that ended the run early; empty if none did."""


def write_report(run: Run, summary: GrpoSummary, *, sweep: SweepRecord | None = None) -> GrpoReport:
    """Write `trained` and the report into the run directory, and return the report. `sweep`
    describes the adapters that the trained one was chosen from."""
    best = summary.selection.best
    saved = summary.checkpoints.read(best)
    run.write_folder("trained", lambda folder: _copy(saved.folder, folder))
    known = {task.id: task for taskset in summary.tasksets for task in taskset.tasks}
    steps = tuple(_with_tasks(step, known) for step in summary.log.read())
    report = GrpoReport(
        run=run.name,
        model=summary.base,
        seed=summary.config.seed,
        loss=summary.config.loss.type,
        advantages=summary.config.advantage_name,
        staleness=summary.config.staleness or 0,
        game="" if summary.config.game is None else summary.config.game.function,
        tasksets=tuple(
            describe_taskset(each).model_copy(update={"temperature": each.sampling.temperature})
            for each in summary.tasksets
        ),
        rows=tuple(summary.rows),
        chosen_step=best,
        checkpoints=tuple(
            CheckpointRecord(step=step, mean=mean, is_chosen=step == best)
            for step, mean in sorted(summary.selection.means.items())
        ),
        steps=steps,
        sweep=sweep,
        num_rollouts=int(_total(steps, "grpo/num_rollouts")),
        num_tokens=int(_total(steps, DRAWN)),
        spent=SpentRecord(
            drawn_tokens=int(_total(steps, DRAWN)) + sum(summary.selection.answer_tokens.values()),
            trained_tokens=int(_total(steps, TRAINED)),
        ),
        stop_reason=summary.stop_reason,
        seconds=run.worked_s,
        warnings=(*_warn_of_scorers(run), *_make_warnings(summary, steps), *_warn_of_sweep(sweep)),
    )
    run.write_json("report.json", report.model_dump(mode="json", exclude_none=True))
    return report


def _with_tasks(step: TrainStepRecord, known: Mapping[str, Task]) -> TrainStepRecord:
    """Add prompts and references to the step's examples, if their tasks are known here."""
    examples = tuple(
        example.model_copy(update=describe_task(known[example.task]))
        if example.task in known
        else example
        for example in step.examples
    )
    return step.model_copy(update={"examples": examples})


def _copy(source: Path, folder: Path) -> None:
    """Copy all but hidden files: a model's folder may be a checkout."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)


def _total(steps: Sequence[TrainStepRecord], name: str) -> float:
    return math.fsum(step.metrics.get(name) or 0.0 for step in steps)


def _make_warnings(summary: GrpoSummary, steps: Sequence[TrainStepRecord]) -> list[str]:
    """Return the warnings, the most serious first."""
    return [
        *_warn_of_result(summary),
        *_warn_of_failures(summary, steps),
        *_warn_of_groups(summary, steps),
        *(note for taskset in summary.tasksets for note in taskset.notes),
        *warn_of_small_samples(summary.rows),
        *warn_of_batches(summary.engine),
    ]


def _warn_of_scorers(run: Run) -> list[str]:
    """Warn of batches drawn before answers were scored again, whose training cannot be undone."""
    again = run.last(SET_ASIDE)
    num = sum(event.seq < again.seq for event in run.events(BATCH)) if again is not None else 0
    if not num:
        return []
    return [
        f"The run was scored again after {num} steps were drawn: those were trained with the "
        "rewards they had before."
    ]


def _warn_of_sweep(sweep: SweepRecord | None) -> list[str]:
    if sweep is None:
        return []
    errors = [adapter.error for adapter in sweep.adapters if adapter.error]
    failed = [
        f"{len(errors)} of {len(sweep.adapters)} adapters could not be trained to their end and "
        f"are not ranked. The first error: {error}"
        for error in errors[:1]
    ]
    if len(sweep.settings) < 2 or sweep.settings[0].num_seeds > 1:
        return failed
    return [
        *failed,
        f"Each of {len(sweep.settings)} settings was trained with one seed: the lead of the best "
        "may be luck. Write --seeds 3, for example.",
    ]


def _warn_of_result(summary: GrpoSummary) -> list[str]:
    warnings = [
        f"The {row.name} is better than the trained policy by {row.lead.mean:.3f} "
        f"({row.lead.low:.3f} to {row.lead.high:.3f}) on the report tasks."
        for row in summary.rows
        if row.lead is not None and row.lead.low is not None and row.lead.low > 0
    ]
    if summary.selection.best == 0 and summary.tasksets:
        warnings.append(
            "No checkpoint is better than the start on the select tasks: `trained` is the start."
        )
    if not summary.tasksets:
        warnings.append("There were no tasksets to measure on: `trained` is the newest checkpoint.")
    if summary.config.advantages == "shuffled":
        warnings.append("A control: advantages were shuffled, so nothing was to be learned.")
    return warnings


def _warn_of_failures(summary: GrpoSummary, steps: Sequence[TrainStepRecord]) -> list[str]:
    warnings = warn_of_failed_tasks(summary.rows)
    unmeasured = [step for step, mean in summary.selection.means.items() if mean is None]
    if unmeasured and summary.tasksets:
        warnings.append(
            f"{len(unmeasured)} of {len(summary.selection.means)} checkpoints failed on select "
            "tasks; they were compared with others on the tasks that both answered."
        )
    num_failed = int(_total(steps, "grpo/num_failed_rollouts"))
    if num_failed:
        total = int(_total(steps, "grpo/num_rollouts"))
        warnings.append(f"{num_failed:,} of {total:,} rollouts failed and were not trained on.")
    return warnings


def _warn_of_groups(summary: GrpoSummary, steps: Sequence[TrainStepRecord]) -> list[str]:
    trained = _total(steps, "grpo/num_groups")
    wanted = summary.config.groups_per_step * len(steps)
    if trained >= FEW_GROUPS * wanted:
        return []
    return [
        f"Only {trained:.0f} of {wanted} groups had rewards that differ: most tasks were too easy "
        "or too hard. Raise group_size or max_extra_groups, or take other tasks."
    ]
