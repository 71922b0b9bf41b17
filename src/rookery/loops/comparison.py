"""The rows of a report: each entry's mean reward on the same tasks, with confidence intervals.

    rows = compare({"evolved": rewards, "best founder": rewards}, tasks, weights=..., seed=0)
    rows[0].mean, rows[0].gain.low

Rewards are keyed by task id. An entry that misses a task has no mean and no differences.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from rookery.config import Config
from rookery.ports import Engine
from rookery.reports import Estimate, ReportRow, SampledRecord, TasksetRecord
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.search.merit import vote
from rookery.search.statistics import Interval, Strata, bootstrap_mean, paired_difference
from rookery.seeding import stream
from rookery.tasks.splits import question_of
from rookery.tasks.taskset import Taskset
from rookery.types import Group, ModelRef, Rollout, Task

if TYPE_CHECKING:  # needs torch, which an evolution may lack
    from rookery.engines import AnySamplerConfig

__all__ = [
    "ReportConfig",
    "Samples",
    "best_of",
    "compare",
    "compare_pairs",
    "complete_means",
    "describe_taskset",
    "elected",
    "mean_rewards",
    "warn_of_batches",
    "warn_of_failed_tasks",
    "warn_of_precision",
    "warn_of_small_samples",
]

Rewards = Mapping[str, float]


def compare(
    rewards: Mapping[str, Rewards],
    tasks: Sequence[Task],
    *,
    weights: Mapping[str, float],
    seed: int,
) -> list[ReportRow]:
    """Return a row per entry: mean, `gain` over the second entry, `lead` over the first, the
    winner.

    Differences are paired by task. All intervals treat tasks of one question as one cluster.
    Rewards of any entry bound the intervals of all: an entry that only lost might have won 10.
    """
    paired = _Paired(rewards, tasks, weights)
    whole, strata, limits = paired.whole, paired.strata, paired.limits

    def difference(ours: str, theirs: str, key: str) -> Estimate | None:
        return paired.difference(ours, theirs, rng=stream(seed, key, ours))

    winner, reference = list(rewards)[:2]
    rows = []
    for name, earned in rewards.items():
        rng = stream(seed, "report", name)
        interval = (
            bootstrap_mean(whole[name], rng=rng, strata=strata, limits=limits)
            if name in whole
            else None
        )
        mean = Estimate() if interval is None else _estimate(interval)
        rows.append(
            ReportRow(
                name=name,
                is_winner=name == winner,
                mean=mean.mean,
                low=mean.low,
                high=mean.high,
                gain=difference(name, reference, "gain"),
                lead=difference(name, winner, "lead"),
                by_source=dict(complete_means(earned, tasks)),
                num_failed=sum(task.id not in earned for task in tasks),
                small="" if interval is None else interval.small,
            )
        )
    return rows


class _Paired:
    """The rewards of entries that miss no task, ready for pairing."""

    def __init__(
        self, rewards: Mapping[str, Rewards], tasks: Sequence[Task], weights: Mapping[str, float]
    ) -> None:
        self.strata = Strata(
            names=tuple(task.source for task in tasks),
            weights=weights,
            clusters=tuple(question_of(task) for task in tasks),
        )
        self.whole = {
            name: [by_task[task.id] for task in tasks]
            for name, by_task in rewards.items()
            if all(task.id in by_task for task in tasks)
        }
        earned = [reward for by_task in rewards.values() for reward in by_task.values()]
        self.limits = (min([0.0, *earned]), max([1.0, *earned]))

    def difference(self, ours: str, theirs: str, *, rng: np.random.Generator) -> Estimate | None:
        """Return the paired difference, or None for equal names or if an entry misses a task."""
        if ours == theirs or not {ours, theirs} <= set(self.whole):
            return None
        pair = (self.whole[ours], self.whole[theirs])
        return _estimate(paired_difference(*pair, rng=rng, strata=self.strata, limits=self.limits))


def compare_pairs(
    rewards: Mapping[str, Rewards],
    tasks: Sequence[Task],
    *,
    weights: Mapping[str, float],
    seed: int,
) -> dict[tuple[str, str], Estimate]:
    """Return by how much each entry beats each later one, paired by task. Skips incomplete ones."""
    paired = _Paired(rewards, tasks, weights)
    differences = {
        (ours, theirs): paired.difference(ours, theirs, rng=stream(seed, "pair", ours, theirs))
        for ours, theirs in combinations(paired.whole, 2)
    }
    return {pair: difference for pair, difference in differences.items() if difference is not None}


def mean_rewards(rewards: Sequence[Rewards]) -> dict[str, float]:
    """Average several rewards per task, over the tasks that all of them have."""
    common = set.intersection(*(set(by_task) for by_task in rewards))
    return {
        task: fmean(by_task[task] for by_task in rewards) for task in rewards[0] if task in common
    }


class ReportConfig(Config):
    """How report tasks are answered."""

    samples: int | None = Field(default=None, ge=2)
    """Further answers drawn per task, for pass@1, pass@k and the majority's reward. null: none."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Several answers per report task: their number and sampling parameters."""

    num: int
    params: Mapping[str, float] = field(default_factory=dict)

    async def measure(
        self,
        evaluator: TasksetEvaluator,
        refs: Mapping[str, ModelRef],
        tasks: Sequence[Task],
        *,
        weights: Mapping[str, float],
        seed: int,
    ) -> dict[str, SampledRecord]:
        """Return the results by model name, for tasks with drawn answers. Reuses recorded ones."""
        drawn = [task for task in tasks if evaluator.can_draw(task)]
        if not drawn:
            return {}
        drawing = evaluator.drawing(self.num, **self.params)
        groups = await drawing.rollout(list(refs.values()), drawn)

        def sum_up() -> dict[str, SampledRecord]:
            return {
                name: _sampled(
                    groups[place * len(drawn) : (place + 1) * len(drawn)],
                    read=drawing.read_answer,
                    interval=_Intervals(drawn, weights, seed, name),
                )
                for place, name in enumerate(refs)
            }

        return await asyncio.to_thread(sum_up)


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Makes confidence intervals of means over tasks."""

    tasks: Sequence[Task]
    weights: Mapping[str, float]
    seed: int
    name: str

    def __call__(self, what: str, values: Sequence[float]) -> Estimate:
        strata = Strata(
            names=tuple(task.source for task in self.tasks),
            weights=self.weights,
            clusters=tuple(question_of(task) for task in self.tasks),
        )
        rng = stream(self.seed, "samples", what, self.name)
        limits = (min([0.0, *values]), max([1.0, *values]))
        return _estimate(bootstrap_mean(values, rng=rng, strata=strata, limits=limits))


def _sampled(
    groups: Sequence[Group], *, read: Callable[[Rollout], str | None], interval: _Intervals
) -> SampledRecord:
    rewards = [[r.reward for r in g.rollouts if r.reward is not None] for g in groups]
    num = len(groups[0].rollouts)
    num_failed = sum(len(drawn) < num for drawn in rewards)
    if num_failed:
        return SampledRecord(num=num, num_failed=num_failed)
    sizes = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < num]
    return SampledRecord(
        num=num,
        pass_at={
            k: interval(f"pass@{k}", [best_of(drawn, k) for drawn in rewards])
            for k in [*sizes, num]
        },
        majority=interval(
            "majority",
            [
                elected(map(read, g.rollouts), drawn)
                for g, drawn in zip(groups, rewards, strict=True)
            ],
        ),
    )


def best_of(rewards: Sequence[float], k: int) -> float:
    """Return the best of k answers, averaged over all ways to choose k. For rewards of 0 and 1 this
    is the unbiased pass@k, 1 - C(wrong, k) / C(all, k).

    >>> best_of([1.0, 0.0, 0.0, 0.0], 2) 0.5
    """
    ways = math.comb(len(rewards), k)
    ordered = enumerate(sorted(rewards))
    return math.fsum(reward * (math.comb(place, k - 1) / ways) for place, reward in ordered)


def elected(answers: Iterable[str | None], rewards: Sequence[float]) -> float:
    """Return the reward of the most frequent answer, or of the first one if none can be read."""
    known = list(answers)
    most = vote(known)
    return rewards[0 if most is None else known.index(most)]


def complete_means(
    rewards: Rewards, tasks: Sequence[Task], *, by_weight: bool = False
) -> dict[str, float]:
    """Return the mean of each source with a reward for every task, computed by `mean_by_source`."""
    sizes = Counter(task.source for task in tasks)
    earned = Counter(task.source for task in tasks if task.id in rewards)
    means = mean_by_source(rewards, tasks, by_weight=by_weight)
    return {source: mean for source, mean in means.items() if earned[source] == sizes[source]}


def describe_taskset(taskset: Taskset) -> TasksetRecord:
    """Count the tasks of each split."""
    return TasksetRecord(
        name=taskset.name,
        weight=taskset.weight,
        num_search=len(taskset.split("search")),
        num_select=len(taskset.split("select")),
        num_report=len(taskset.split("report")),
        num_questions=len(set(map(question_of, taskset.split("report")))),
    )


def warn_of_failed_tasks(rows: Sequence[ReportRow]) -> list[str]:
    return [
        f"The {row.name} failed on {row.num_failed} of the report tasks and has no mean: the "
        "mean of its other answers would mislead."
        for row in rows
        if row.num_failed
    ]


def warn_of_small_samples(rows: Sequence[ReportRow]) -> list[str]:
    reasons = dict.fromkeys(row.small for row in rows if row.small)
    return [f"The report is small ({reason}): its intervals are rough." for reason in reasons]


def warn_of_batches(engine: Engine) -> list[str]:
    """Warn of a mixture of experts on the CPU, where other models do not depend on the batch."""
    if engine.is_remote or engine.is_batch_invariant:
        return []
    return [
        "The model is a mixture of experts: the last bits of an answer depend on its batch. In "
        "another run close choices may come out otherwise."
    ]


def warn_of_precision(engine: "AnySamplerConfig") -> list[str]:
    """Warn of weights that were rounded to fewer bits than the computation uses."""
    if engine.rounding is None:
        return []
    return [
        f"The linear layers had {engine.rounding} weights (`weights: {engine.rounding}`), so that "
        "answers differ from those in float32: measure the result with the weights that will "
        "serve it."
    ]


def _estimate(interval: Interval) -> Estimate:
    return Estimate(mean=interval.estimate, low=interval.low, high=interval.high)
