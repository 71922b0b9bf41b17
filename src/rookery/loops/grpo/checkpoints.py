"""Checkpoints: the policy as other programs load it, with the trainer's state beside it.

    runs/x/start/                          the adapter the run began with; a model stays where it is
    runs/x/checkpoints/adapter_step_20/    a PEFT folder, or
    runs/x/checkpoints/step_20/            a folder that transformers and vLLM load
    runs/x/checkpoints/trainer_step_20/    trainer.safetensors, to go on from

An event names each one after it is on disk; a run goes on from the newest that an event names.

Choosing a checkpoint on the `select` split, and measuring the choice on `report`, once.

Each checkpoint is compared with the best before it. Where one of the two failed on some tasks, they
are compared on those that both answered: what is missing counts for neither.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rookery.concurrency import run_in_thread
from rookery.loops.comparison import Samples, compare, complete_means
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights, SavedWeights
from rookery.ports import Evaluator
from rookery.reports import ReportRow, SampledRecord
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.runs import FORMER, Event, NewEvent, Run
from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter, Evaluation, ModelRef, Task
from rookery.weights import read_adapter

__all__ = ["START", "STATE", "Checkpoints", "Selection", "read_start"]


CHECKPOINT = "checkpoint"
START = "start"
"""The folder of the adapter that a run began with."""
STATE = "trainer.safetensors"


def read_start(run: Run) -> Adapter | None:
    """The adapter the run began with; None when it has not begun."""
    if run.get(CHECKPOINT, "0") is None:
        return None
    return read_adapter(run.path / START)


class Checkpoints:
    """The checkpoints of one run, by the number of steps before them. 0 is the start."""

    def __init__(self, run: Run, *, weights: PolicyWeights, keep: int) -> None:
        self._run = run
        self._weights = weights
        self._keep = keep
        saved = [int(event.payload["step"]) for event in run.events(CHECKPOINT)]
        self.held = [step for step in saved if self._path(step).is_dir()]
        """Those on disk, oldest first."""

    @property
    def newest(self) -> int | None:
        """Steps before the newest one; None before the start is written."""
        return self.held[-1] if self.held else None

    async def save(self, step: int) -> None:
        """Write one, durably, unless it is there."""
        if self._run.get(CHECKPOINT, str(step)) is not None:
            return
        if step > 0:
            await self._write_state(step)
        if step > 0 or self._weights.start is None:
            await self._write_weights(self._folder(step))
        version = await self._weights.version()
        payload = {"step": step, "folder": self._folder(step), "version": version}
        await self._run.append(CHECKPOINT, payload, key=str(step))
        self.held.append(step)

    async def _write_weights(self, name: str) -> None:
        with self._run.blobs.stage() as staged:
            await self._weights.write(staged / "weights")
            await run_in_thread(
                self._run.write_folder, name, lambda folder: _move(staged / "weights", folder)
            )

    async def _write_state(self, step: int) -> None:
        with self._run.blobs.stage() as staged:
            await self._weights.trainer.save(POLICY, staged / STATE)
            await run_in_thread(
                self._run.write_folder, _state(step), lambda folder: _move(staged, folder)
            )

    async def restore(self) -> int:
        """Bring the trainer to the newest checkpoint; how many steps it has then taken.

        A model that is not the one the run began with is refused.
        """
        step = self.newest or 0
        if step > 0:
            await self._weights.trainer.load(POLICY, self._run.path / _state(step) / STATE)
        elif self.newest == 0:
            self.read(0).require(await self._weights.version())
        return step

    def read(self, step: int) -> SavedWeights:
        """A checkpoint that is kept."""
        event = self._run.get(CHECKPOINT, str(step))
        assert event is not None, "only steps that were saved are asked for"
        return SavedWeights(folder=self._path(step), version=event.payload["version"])

    async def prune(self, *, best: int) -> None:
        """Remove all but the newest, as many as are to be kept, and the best. The start stays.
        Only the newest can be gone on from."""
        newest = self.held[-self._keep :]
        for step in [step for step in self.held if step not in newest]:
            await asyncio.to_thread(self._run.remove_folder, _state(step))
            if step not in (best, 0):
                await asyncio.to_thread(self._run.remove_folder, self._folder(step))
                self.held.remove(step)

    def _path(self, step: int) -> Path:
        return self._run.path / self._folder(step)

    def _folder(self, step: int) -> str:
        """In the run, or the path of a model elsewhere."""
        if step > 0:
            return f"checkpoints/{self._weights.folder_name}_{step}"
        return START if self._weights.start is None else str(self._weights.start)


def _state(step: int) -> str:
    return f"checkpoints/trainer_step_{step}"


def _move(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        os.rename(path, folder / path.name)


SELECT = "select"
NOT_MEASURED: Mapping[str, object] = {
    "mean": None,
    "by_source": {},
    "num_failed": 0,
    "first_error": "",
    "is_best": True,
}
"""Of a checkpoint without tasks to compare it on: the newest is taken for the best."""


class Selection:
    """Measures policies on held-out tasks. Every answer is in the run before it counts."""

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        tasksets: Sequence[Taskset],
        weights: PolicyWeights,
        run: Run,
        samples: Samples | None = None,
    ) -> None:
        """`samples` are drawn to each report task besides."""
        self._evaluator = evaluator
        self._tasksets = tasksets
        self._weights = weights
        self._run = run
        self._samples = samples
        self._sampled: dict[str, SampledRecord] = {}
        """What they came to, by name."""
        self.means: dict[int, float | None] = {}
        """By checkpoint, on the select tasks; None for one that failed on any of them."""
        self.answer_tokens: dict[int, int] = {}
        """By checkpoint, of its answers to the select tasks."""
        self._best: tuple[int, ModelRef] | None = None
        for event in run.events(SELECT):
            self._note(event)

    @property
    def best(self) -> int:
        """The best checkpoint so far, the earliest of equal ones; 0 is the start. The newest where
        there are no tasks to measure by."""
        return 0 if self._best is None else self._best[0]

    async def measure(self, step: int, model: ModelRef) -> None:
        """Read the select tasks with a checkpoint, unless that was done."""
        if step in self.means:
            return
        tasks = self._split("select")
        measured = await self._measured(model, tasks) if tasks else NOT_MEASURED
        payload = {**measured, "model": asdict(model)}
        new = NewEvent(kind=SELECT, key=str(step), payload=payload, first_wins=True)
        [event] = await self._run.append_many([new])
        self._note(event)

    async def measure_again(self, steps: Collection[int]) -> None:
        """Those of the checkpoints whose measurement was set aside, by their recorded answers."""
        for event in list(self._run.events(f"{FORMER}{SELECT}")):
            if event.key and int(event.key) in steps:
                await self.measure(int(event.key), ModelRef(**event.payload["model"]))

    async def _measured(self, model: ModelRef, tasks: Sequence[Task]) -> dict[str, object]:
        [evaluation] = await self._evaluator.evaluate([model], tasks)
        by_source = complete_means(evaluation.rewards, tasks, by_weight=True)
        mean = self._mean(by_source, tasks)
        errors = list(evaluation.errors.values())
        return {
            "mean": mean,
            "num_answer_tokens": evaluation.num_answer_tokens,
            "by_source": by_source,
            "num_failed": len(errors),
            "first_error": (errors or [""])[0],
            "is_best": await self._is_best(evaluation, mean, tasks),
        }

    def _note(self, event: Event) -> None:
        step, payload = int(event.key), event.payload
        self.means[step] = payload["mean"]
        self.answer_tokens[step] = int(payload.get("num_answer_tokens", 0))
        if payload["is_best"]:
            self._best = step, ModelRef(**payload["model"])

    async def _is_best(
        self, evaluation: Evaluation, mean: float | None, tasks: Sequence[Task]
    ) -> bool:
        if self._best is None:
            return True
        step, model = self._best
        best_mean = self.means[step]
        if mean is not None and best_mean is not None:
            return mean > best_mean
        [best] = await self._evaluator.evaluate([model], tasks)  # found in the run
        both = [t for t in tasks if t.id in evaluation.rewards and t.id in best.rewards]
        ours = self._mean(mean_by_source(evaluation.rewards, both, by_weight=True), tasks)
        theirs = self._mean(mean_by_source(best.rewards, both, by_weight=True), tasks)
        if ours is None or theirs is None:
            return mean is not None  # they have too little in common: one that is whole is better
        return ours > theirs

    async def report(
        self, saved: Mapping[str, SavedWeights | None], *, seed: int
    ) -> list[ReportRow]:
        """A row for each on the report tasks: the first is the result, gains are over the second.
        None is the base model."""
        rewards = await self.rewards(saved, seed=seed)
        return await asyncio.to_thread(self.compare, rewards, seed=seed) if rewards else []

    def compare(self, rewards: Mapping[str, Mapping[str, float]], *, seed: int) -> list[ReportRow]:
        """The rows of what `rewards` found."""
        rows = compare(rewards, self._split("report"), weights=self._shares, seed=seed)
        return [row.model_copy(update={"sampled": self._sampled.get(row.name)}) for row in rows]

    async def rewards(
        self, saved: Mapping[str, SavedWeights | None], *, seed: int
    ) -> dict[str, Mapping[str, float]]:
        """What each earned on the report tasks, by task; empty without such tasks."""
        tasks = self._split("report")
        if not tasks:
            return {}
        rewards: dict[str, Mapping[str, float]] = {}

        async def evaluate(refs: Mapping[str, ModelRef]) -> None:
            evaluations = await self._evaluator.evaluate(list(refs.values()), tasks)
            for name, evaluation in zip(refs, evaluations, strict=True):
                rewards[name] = evaluation.rewards
            if self._samples is not None and isinstance(self._evaluator, TasksetEvaluator):
                self._sampled |= await self._samples.measure(
                    self._evaluator, refs, tasks, weights=self._shares, seed=seed
                )

        await self._weights.measure(saved, evaluate)
        return rewards

    @property
    def _shares(self) -> dict[str, float]:
        return {taskset.name: taskset.weight for taskset in self._tasksets}

    def _split(self, name: SplitName) -> list[Task]:
        return [task for taskset in self._tasksets for task in taskset.split(name)]

    def _mean(self, by_source: Mapping[str, float], tasks: Sequence[Task]) -> float | None:
        """Over tasksets by their weights; None when one of them misses a task."""
        if set(by_source) != {task.source for task in tasks}:
            return None
        weights = {t.name: t.weight for t in self._tasksets if t.name in by_source}
        total = sum(weights.values())
        return sum(weights[name] * mean for name, mean in by_source.items()) / total
