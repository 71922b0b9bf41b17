"""The rows of the report: what each entry earned on the same tasks, and how sure one can be.

    rows = compare({"evolved": rewards, "best founder": rewards}, tasks, weights=..., seed=0)
    rows[0].mean, rows[0].gain.low

Rewards are by task id. An entry that misses a task has no mean, and no difference to another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from rookery.ports import Engine
from rookery.reports import Estimate, ReportRow
from rookery.rollout import mean_by_source
from rookery.search.statistics import Interval, Strata, bootstrap_mean, paired_difference
from rookery.seeding import stream
from rookery.tasks.splits import question_of
from rookery.types import Task

__all__ = ["compare", "complete_means", "warn_of_batches", "warn_of_small_samples"]

Rewards = Mapping[str, float]


def compare(
    rewards: Mapping[str, Rewards],
    tasks: Sequence[Task],
    *,
    weights: Mapping[str, float],
    seed: int,
) -> list[ReportRow]:
    """A row per entry: its mean, `gain` over the second entry, `lead` over the first, the winner.

    Differences are paired by task, and tasks of one question are one cluster in all intervals.
    An entry may earn what any of them has earned: one that only lost may have won 10.
    """
    strata = Strata(
        names=tuple(task.source for task in tasks),
        weights=weights,
        clusters=tuple(question_of(task) for task in tasks),
    )
    whole = {
        name: [own[task.id] for task in tasks]
        for name, own in rewards.items()
        if all(task.id in own for task in tasks)
    }

    earned = [reward for own in rewards.values() for reward in own.values()]
    limits = (min([0.0, *earned]), max([1.0, *earned]))

    def difference(ours: str, theirs: str, key: str) -> Estimate | None:
        if ours == theirs or not {ours, theirs} <= set(whole):
            return None
        rng = stream(seed, key, ours)
        return _estimate(
            paired_difference(whole[ours], whole[theirs], rng=rng, strata=strata, limits=limits)
        )

    winner, reference = list(rewards)[:2]
    rows = []
    for name, own in rewards.items():
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
                by_source=dict(complete_means(own, tasks)),
                num_failed=sum(task.id not in own for task in tasks),
                small="" if interval is None else interval.small,
            )
        )
    return rows


def complete_means(rewards: Rewards, tasks: Sequence[Task]) -> dict[str, float]:
    """The mean reward of each source that misses none of its tasks."""
    sizes = Counter(task.source for task in tasks)
    earned = Counter(task.source for task in tasks if task.id in rewards)
    means = mean_by_source(rewards, tasks)
    return {source: mean for source, mean in means.items() if earned[source] == sizes[source]}


def warn_of_small_samples(rows: Sequence[ReportRow]) -> list[str]:
    reasons = dict.fromkeys(row.small for row in rows if row.small)
    return [
        f"The report is of a small sample ({reason}): its intervals are rough."
        for reason in reasons
    ]


def warn_of_batches(engine: Engine) -> list[str]:
    """Of a mixture of experts on the CPU: all else there has the same bits in any batch, and on
    GPUs nothing has."""
    if engine.is_remote or engine.is_batch_invariant:
        return []
    return [
        "The model is a mixture of experts: the last bits of an answer depend on what is computed "
        "beside it, so that close choices may come out otherwise in another run."
    ]


def _estimate(interval: Interval) -> Estimate:
    return Estimate(mean=interval.estimate, low=interval.low, high=interval.high)
