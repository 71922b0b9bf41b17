"""Checkpoints of the policy, and the choice of the best one.

    runs/x/start/                          the initial adapter; an initial model stays in place
    runs/x/checkpoints/adapter_step_20/    a PEFT folder, or
    runs/x/checkpoints/step_20/            a folder that transformers and vLLM load
    runs/x/checkpoints/trainer_step_20/    trainer.safetensors, the state to resume from

An event names each checkpoint once it is on disk. A run resumes from the newest one named.

`Selection` compares each checkpoint with the best before it on the `select` split, and measures the
chosen one once on `report`. If one of the two failed on some tasks, only tasks that both answered
count.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rookery.loops.comparison import Samples, compare, complete_means
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights, SavedWeights
from rookery.ports import Evaluator
from rookery.reports import ReportRow, SampledRecord
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.runs import FORMER, Event, NewEvent, Run
from rookery.runtime.concurrency import run_in_thread
from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter, Evaluation, ModelRef, Task
from rookery.weights import read_adapter

__all__ = ["START", "STATE", "Checkpoints", "Selection", "read_start"]


CHECKPOINT = "checkpoint"
START = "start"
"""Folder of the initial adapter."""
STATE = "trainer.safetensors"


def read_start(run: Run) -> Adapter | None:
    """Return the adapter that the run started from, or None if it has not started."""
    if run.get(CHECKPOINT, "0") is None:
        return None
    return read_adapter(run.path / START)


class Checkpoints:
    """The checkpoints of one run, keyed by step number. Step 0 is the start."""

    def __init__(self, run: Run, *, weights: PolicyWeights, keep: int) -> None:
        self._run = run
        self._weights = weights
        self._keep = keep
        saved = [int(event.payload["step"]) for event in run.events(CHECKPOINT)]
        self.held = [step for step in saved if self._path(step).is_dir()]
        """Steps of the checkpoints on disk, oldest first."""

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint; None before the start is written."""
        return self.held[-1] if self.held else None

    async def save(self, step: int) -> None:
        """Write a checkpoint durably. Idempotent."""
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
        """Load the newest checkpoint into the trainer and return its step.

        Raises RunError if the policy is not the one that the run started from.
        """
        step = self.newest or 0
        if step > 0:
            await self._weights.trainer.load(POLICY, self._run.path / _state(step) / STATE)
        elif self.newest == 0:
            self.read(0).require(await self._weights.version())
        return step

    def read(self, step: int) -> SavedWeights:
        """Return a checkpoint that is on disk."""
        event = self._run.get(CHECKPOINT, str(step))
        assert event is not None, "only steps that were saved are asked for"
        return SavedWeights(folder=self._path(step), version=event.payload["version"])

    async def prune(self, *, best: int) -> None:
        """Remove all checkpoints but the `keep` newest, the best and the start. Trainer states are
        kept only for the newest: a run resumes from these alone."""
        newest = self.held[-self._keep :]
        for step in [step for step in self.held if step not in newest]:
            await asyncio.to_thread(self._run.remove_folder, _state(step))
            if step not in (best, 0):
                await asyncio.to_thread(self._run.remove_folder, self._folder(step))
                self.held.remove(step)

    def _path(self, step: int) -> Path:
        return self._run.path / self._folder(step)

    def _folder(self, step: int) -> str:
        """Return a name inside the run, or the path of an initial model elsewhere."""
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
"""Measurement without select tasks: the newest checkpoint counts as the best."""


class Selection:
    """Measures policies on held-out tasks. Every answer is stored in the run before it counts."""

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        tasksets: Sequence[Taskset],
        weights: PolicyWeights,
        run: Run,
        samples: Samples | None = None,
    ) -> None:
        """`samples` are further answers per report task."""
        self._evaluator = evaluator
        self._tasksets = tasksets
        self._weights = weights
        self._run = run
        self._samples = samples
        self._sampled: dict[str, SampledRecord] = {}
        """Results of the further answers, by row name."""
        self.means: dict[int, float | None] = {}
        """Mean select reward by checkpoint; None if any task failed."""
        self.answer_tokens: dict[int, int] = {}
        """Answer tokens spent on the select tasks, by checkpoint."""
        self._best: tuple[int, ModelRef] | None = None
        for event in run.events(SELECT):
            self._note(event)

    @property
    def best(self) -> int:
        """Step of the best checkpoint, the first among equals. Without select tasks, the newest."""
        return 0 if self._best is None else self._best[0]

    async def measure(self, step: int, model: ModelRef) -> None:
        """Measure a checkpoint on the select tasks. Idempotent."""
        if step in self.means:
            return
        tasks = self._split("select")
        measured = await self._measured(model, tasks) if tasks else NOT_MEASURED
        payload = {**measured, "model": asdict(model)}
        new = NewEvent(kind=SELECT, key=str(step), payload=payload, first_wins=True)
        [event] = await self._run.append_many([new])
        self._note(event)

    async def measure_again(self, steps: Collection[int]) -> None:
        """Repeat those measurements of `steps` that were set aside, from their recorded answers."""
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
        [best] = await self._evaluator.evaluate(
            [model], tasks
        )  # recorded answers: nothing is drawn
        both = [t for t in tasks if t.id in evaluation.rewards and t.id in best.rewards]
        ours = self._mean(mean_by_source(evaluation.rewards, both, by_weight=True), tasks)
        theirs = self._mean(mean_by_source(best.rewards, both, by_weight=True), tasks)
        if ours is None or theirs is None:
            return mean is not None  # too few common tasks: prefer a complete one
        return ours > theirs

    async def report(
        self, saved: Mapping[str, SavedWeights | None], *, seed: int
    ) -> list[ReportRow]:
        """Return one row per entry, None being the base model, on the report tasks. The first row
        is the result; its gain is over the second."""
        rewards = await self.rewards(saved, seed=seed)
        return await asyncio.to_thread(self.compare, rewards, seed=seed) if rewards else []

    def compare(self, rewards: Mapping[str, Mapping[str, float]], *, seed: int) -> list[ReportRow]:
        """Return the report rows for the output of `rewards`."""
        rows = compare(rewards, self._split("report"), weights=self._shares, seed=seed)
        return [row.model_copy(update={"sampled": self._sampled.get(row.name)}) for row in rows]

    async def rewards(
        self, saved: Mapping[str, SavedWeights | None], *, seed: int
    ) -> dict[str, Mapping[str, float]]:
        """Return each entry's rewards on the report tasks, by task. Empty without report tasks."""
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
        """Average over tasksets by weight. None if a taskset has no complete mean."""
        if set(by_source) != {task.source for task in tasks}:
            return None
        weights = {t.name: t.weight for t in self._tasksets if t.name in by_source}
        total = sum(weights.values())
        return sum(weights[name] * mean for name, mean in by_source.items()) / total
