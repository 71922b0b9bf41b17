"""The grpo loop.

    start = a new adapter, or one from a folder; or all weights of a model
    for step in steps:
        groups     = several answers to each task, with rewards      # search split
        advantages = how much better than its group each answer was
        gradients  = of the loss of log-probabilities and advantages
        step       = one optimizer step, when no draw is under way
        publish    : the engine gets the new weights
        every save_every steps: checkpoint, measured on the select split
    trained = the best checkpoint
    report(trained, start, base)                                     # report split, read once

    staleness 0     draw 0 | gradients 0 | step 0 | draw 1      | gradients 1 | step 1 | ...
    staleness 1     draw 0 | gradients 0 | step 0 | gradients 1 | step 1 | ...
                           | draw 1      |        | draw 2      |        |
                    draw k + 1 uses the weights before step k, always

| stage   | consumes                 | produces            | waits for                     |
|---------|--------------------------|---------------------|-------------------------------|
| draw    | tasks, a policy          | a durable batch     | the engine, the scorer, disk  |
| train   | a batch                  | gradients           | the trainer                   |
| step    | gradients                | new weights         | the trainer, the draw         |
| publish | new weights              | a policy            | the engine                    |
| save    | new weights              | a checkpoint        | the disk, the select tasks    |

`GrpoConfig.drawn_at` fixes which weights draw which step, so timing does not matter. A batch is
durable before it is trained on. A checkpoint is written once the batch of its step is durable, or
if that batch will be drawn with the checkpoint's weights. So a killed run resumes from its newest
checkpoint, trains the same batches again and reaches the same weights.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rookery.loops.grpo.batch import Batch
from rookery.loops.grpo.checkpoints import Checkpoints, Selection
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import (
    DRAWN,
    TRAINED,
    GrpoSummary,
    Step,
    StepLog,
    count_trained,
    write_report,
)
from rookery.loops.grpo.group_source import GroupSource, Policy
from rookery.loops.grpo.policy_trainer import PolicyTrainer
from rookery.loops.grpo.policy_weights import PolicyWeights, SavedWeights
from rookery.ports import UNOBSERVED, Engine, Evaluator, GroupDrawer, Observer
from rookery.reports import GrpoReport, ReportRow
from rookery.runs import Run
from rookery.runs.budget import Budget
from rookery.runtime.concurrency import task_group
from rookery.tasks.taskset import Taskset
from rookery.types import TokenIds

__all__ = ["BatchSource", "GrpoInputs", "Parts", "assemble", "train", "train_policy"]


class BatchSource(Protocol):
    """Source of the batches of a run."""

    def use(self, policy: Policy) -> None:
        """Take note of newly published weights."""
        ...

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """Return the durable batch of a step."""
        ...

    async def release(self, *, before: int) -> None:
        """Free steps below `before`, which are in a checkpoint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoInputs:
    """Everything that one training needs besides engine and run."""

    config: GrpoConfig
    weights: PolicyWeights
    """The initial policy. A resumed run with an adapter has it in its folder: see `read_start`."""
    tasksets: Sequence[Taskset]
    drawer: GroupDrawer | BatchSource
    """Draws groups for the tasks, or supplies batches of other tasks."""
    evaluator: Evaluator
    decode: Callable[[TokenIds], str] | None = None
    """Detokenizer, used to show answers token by token."""


async def train_policy(
    inputs: GrpoInputs, *, engine: Engine, run: Run, observer: Observer[Step] = UNOBSERVED
) -> GrpoReport:
    """Run or resume one training. Leaves checkpoints, `trained` and the report in `run`."""
    base = engine.base.version  # read before training publishes other versions
    parts = assemble(inputs, engine=engine, run=run, observer=observer)
    await train(parts)
    observer.on_phase("report")
    rows = await parts.selection.report(
        {"trained": parts.trained, **parts.baselines}, seed=inputs.config.seed
    )
    summary = parts.summary(base, engine=engine, rows=rows)
    return await asyncio.to_thread(write_report, run, summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of one training."""

    config: GrpoConfig
    tasksets: Sequence[Taskset]
    source: BatchSource
    trainer: PolicyTrainer
    checkpoints: Checkpoints
    selection: Selection
    log: StepLog
    budget: Budget

    @property
    def trained(self) -> SavedWeights:
        """Weights of the best checkpoint."""
        return self.checkpoints.read(self.selection.best)

    @property
    def baselines(self) -> dict[str, SavedWeights | None]:
        """Weights to compare with, by row name. The report's gain is over the first."""
        start = {} if self.config.init_from is None else {"start": self.checkpoints.read(0)}
        return {**start, "base model": None}

    def summary(self, base: str, *, engine: Engine, rows: Sequence[ReportRow]) -> GrpoSummary:
        return GrpoSummary(
            config=self.config,
            base=base,
            engine=engine,
            tasksets=self.tasksets,
            checkpoints=self.checkpoints,
            selection=self.selection,
            log=self.log,
            rows=rows,
            stop_reason=self.budget.stop_reason,
        )


def assemble(inputs: GrpoInputs, *, engine: Engine, run: Run, observer: Observer[Step]) -> Parts:
    config, tasksets, weights = inputs.config, inputs.tasksets, inputs.weights
    return Parts(
        config=config,
        tasksets=tasksets,
        source=_source(inputs, engine, run),
        trainer=PolicyTrainer(weights, engine=engine, config=config),
        checkpoints=Checkpoints(run, weights=weights, keep=config.keep),
        selection=Selection(
            inputs.evaluator, tasksets=tasksets, weights=weights, run=run, samples=config.samples
        ),
        log=StepLog(run, observer=observer, decode=inputs.decode),
        budget=Budget(config.budget, run),
    )


def _source(inputs: GrpoInputs, engine: Engine, run: Run) -> BatchSource:
    if not isinstance(inputs.drawer, GroupDrawer):
        return inputs.drawer
    tasks = [task for taskset in inputs.tasksets for task in taskset.split("search")]
    return GroupSource(
        inputs.drawer,
        tasks=tasks,
        config=inputs.config,
        run=run,
        is_remote=engine.is_remote,
    )


async def train(parts: Parts) -> None:
    """Train from the newest checkpoint to the last step."""
    config, source = parts.config, parts.source
    first = await parts.checkpoints.restore()
    await parts.selection.measure_again(parts.checkpoints.held)
    policy = await parts.trainer.publish(first)
    source.use(policy)
    await _save(parts, policy)
    spending = _Spending(parts, first)
    if first == config.steps or not await spending.has_room(first):
        return
    seconds = _Seconds()
    with seconds.spent_on("draw"):
        batch = await source.batch(first, policy=policy)
    for step in range(first, config.steps):
        spending.add(batch)
        is_last = step + 1 == config.steps or not await spending.has_room(step + 1)
        trained, ahead = await _train_and_draw(parts, batch, policy, seconds, is_last=is_last)
        if (step + 1) % config.publish_every == 0 or is_last:
            with seconds.spent_on("publish"):
                policy = await parts.trainer.publish(step + 1)
                source.use(policy)
        metrics = {**trained, **seconds.take()}
        await parts.log.record(batch, metrics, gaps=parts.trainer.gaps)
        if config.is_checkpoint(step + 1) or is_last:
            await _save(parts, policy)
        if is_last:
            return
        with seconds.spent_on("draw"):
            batch = ahead or await source.batch(step + 1, policy=policy)


class _Spending:
    """Answer tokens spent so far, and whether the budget has room for another step."""

    def __init__(self, parts: Parts, first: int) -> None:
        self._parts = parts
        before = [step.metrics for step in parts.log.read()]
        self._num_done = len(before)
        self._steps = [int((m.get(DRAWN) or 0) + (m.get(TRAINED) or 0)) for m in before[:first]]

    def add(self, batch: Batch) -> None:
        """Count a step that is about to be trained."""
        self._steps.append(batch.counts.num_tokens + count_trained(batch))

    async def has_room(self, step: int) -> bool:
        """Return True if the budget has room for a step, the measurement of the checkpoint after
        it, and that of an earlier one still unmeasured. Each is taken as large as the largest so
        far."""
        measured = self._parts.selection.answer_tokens
        select = [tokens for measured_step, tokens in measured.items() if measured_step <= step]
        is_waiting = self._parts.config.is_checkpoint(step) and step not in measured
        needed = max(self._steps, default=0) + (1 + is_waiting) * max(select, default=0)
        spent = sum(self._steps) + sum(select)
        budget = self._parts.budget
        has_room = await budget.has_room(step, tokens=spent + needed, num_done=self._num_done)
        self._parts.log.observer.on_budget(budget.share)
        return has_room


async def _train_and_draw(
    parts: Parts, batch: Batch, policy: Policy, seconds: "_Seconds", *, is_last: bool
) -> tuple[dict[str, float], Batch | None]:
    """Train a batch and, with staleness 1, draw the next one at the same time.

    The optimizer step waits for the draw, because the engine may compute with the weights that it
    changes.
    """
    step, config = batch.step, parts.config
    with seconds.spent_on("train"):
        rows = await parts.trainer.prepare(step, batch, policy=policy)
    async with task_group() as tasks:
        drawing = None
        if config.staleness and not is_last:
            drawing = tasks.create_task(parts.source.batch(step + 1, policy=policy))
        with seconds.spent_on("train"):
            trained = await parts.trainer.gradients(rows)
        with seconds.spent_on("draw"):
            ahead = await drawing if drawing is not None else None
    if batch.groups:
        with seconds.spent_on("train") as span:
            trained |= await parts.trainer.apply(step)
            # With shared memory the optimizer step publishes the weights too.
            span.publish_s = trained.pop("train/publish_s", 0.0)
    return trained, ahead


async def _save(parts: Parts, policy: Policy) -> None:
    """Save and measure a checkpoint of the published weights, then remove obsolete files."""
    await parts.checkpoints.save(policy.step)
    parts.log.observer.on_phase(f"select {policy.step}")
    await parts.selection.measure(policy.step, policy.ref)
    await parts.checkpoints.prune(best=parts.selection.best)
    await parts.source.release(before=policy.step)
    parts.log.observer.on_phase("train")


@dataclass(slots=True)
class _Span:
    """Seconds that count for another stage than the one being timed."""

    publish_s: float = 0.0
    """Seconds spent publishing weights within the stage."""


class _Seconds:
    """Seconds by stage since the last recorded step."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def spent_on(self, stage: str) -> Iterator["_Span"]:
        began, span = time.perf_counter(), _Span()
        yield span
        self._add(stage, time.perf_counter() - began - span.publish_s)
        if span.publish_s:
            self._add("publish", span.publish_s)

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent

    def _add(self, stage: str, seconds: float) -> None:
        key = f"time/{stage}_s"
        self._spent[key] = self._spent.get(key, 0.0) + seconds
