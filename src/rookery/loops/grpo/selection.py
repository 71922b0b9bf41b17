"""Choosing a checkpoint on the `select` split, and measuring the choice on `report`, once.

Each checkpoint is compared with the best before it. Where one of the two failed on some tasks, they
are compared on those that both answered: what is missing counts for neither.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from rookery.loops.comparison import Samples, compare, complete_means
from rookery.loops.grpo.policy_weights import PolicyWeights, SavedWeights
from rookery.ports import Evaluator
from rookery.reports import ReportRow, SampledRecord
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.runs import FORMER, Event, NewEvent, Run
from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import Taskset
from rookery.types import Evaluation, ModelRef, Task

__all__ = ["Selection"]

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
        by_source = complete_means(evaluation.rewards, tasks)
        mean = self._mean(by_source, tasks)
        errors = list(evaluation.errors.values())
        return {
            "mean": mean,
            "by_source": by_source,
            "num_failed": len(errors),
            "first_error": (errors or [""])[0],
            "is_best": await self._is_best(evaluation, mean, tasks),
        }

    def _note(self, event: Event) -> None:
        step, payload = int(event.key), event.payload
        self.means[step] = payload["mean"]
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
        ours = self._mean(mean_by_source(evaluation.rewards, both), tasks)
        theirs = self._mean(mean_by_source(best.rewards, both), tasks)
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
