"""Choosing a checkpoint on the `select` split, and measuring the choice on `report`, once."""

import asyncio
from collections.abc import Mapping, Sequence

from rookery.loops.comparison import compare, complete_means
from rookery.loops.grpo.policy_weights import PolicyWeights, SavedWeights
from rookery.ports import Evaluator
from rookery.reports import ReportRow
from rookery.runs import NewEvent, Run
from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import Taskset
from rookery.types import ModelRef, Task

__all__ = ["Selection"]

SELECT = "select"


class Selection:
    """Measures policies on held-out tasks. Every answer is in the run before it counts."""

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        tasksets: Sequence[Taskset],
        weights: PolicyWeights,
        run: Run,
    ) -> None:
        self._evaluator = evaluator
        self._tasksets = tasksets
        self._weights = weights
        self._run = run
        self.means: dict[int, float | None] = {
            int(event.key): event.payload["mean"] for event in run.events(SELECT)
        }
        """By checkpoint, on the select tasks; None for one that failed on any of them."""

    async def measure(self, step: int, model: ModelRef) -> None:
        """Read the select tasks with a checkpoint, unless that was done."""
        if step in self.means:
            return
        payload = await self._payload(model, self._split("select"))
        new = NewEvent(kind=SELECT, key=str(step), payload=payload, first_wins=True)
        [event] = await self._run.append_many([new])
        self.means[step] = event.payload["mean"]

    async def _payload(self, model: ModelRef, tasks: Sequence[Task]) -> dict[str, object]:
        if not tasks:
            return {"mean": None, "by_source": {}, "first_error": ""}
        [evaluation] = await self._evaluator.evaluate([model], tasks)
        by_source = complete_means(evaluation.rewards, tasks)
        mean = self._mean(by_source, tasks)
        errors = list(evaluation.errors.values())
        return {"mean": mean, "by_source": by_source, "first_error": (errors or [""])[0]}

    @property
    def best(self) -> int:
        """The checkpoint with the highest mean, the earliest of equal ones; the newest where there
        are no tasks to measure by."""
        if not self._tasksets:
            return max(self.means, default=0)
        measured = {step: mean for step, mean in self.means.items() if mean is not None}
        return min(measured, key=lambda step: (-measured[step], step), default=0)

    async def report(
        self, saved: Mapping[str, SavedWeights | None], *, seed: int
    ) -> list[ReportRow]:
        """A row for each on the report tasks: the first is the result, gains are over the second.
        None is the base model."""
        tasks = self._split("report")
        if not tasks:
            return []
        rewards: dict[str, Mapping[str, float]] = {}

        async def evaluate(refs: Mapping[str, ModelRef]) -> None:
            evaluations = await self._evaluator.evaluate(list(refs.values()), tasks)
            for name, evaluation in zip(refs, evaluations, strict=True):
                rewards[name] = evaluation.rewards

        await self._weights.measure(saved, evaluate)
        weights = {taskset.name: taskset.weight for taskset in self._tasksets}
        return await asyncio.to_thread(compare, rewards, tasks, weights=weights, seed=seed)

    def _split(self, name: SplitName) -> list[Task]:
        return [task for taskset in self._tasksets for task in taskset.split(name)]

    def _mean(self, by_source: Mapping[str, float], tasks: Sequence[Task]) -> float | None:
        """Over tasksets by their weights; None when one of them misses a task."""
        if set(by_source) != {task.source for task in tasks}:
            return None
        weights = {t.name: t.weight for t in self._tasksets if t.name in by_source}
        total = sum(weights.values())
        return sum(weights[name] * mean for name, mean in by_source.items()) / total
