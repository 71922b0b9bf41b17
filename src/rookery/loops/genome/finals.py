"""The end of a run: choose on the select split, measure on the report split, once.

The report holds the chosen candidate beside what one gets without any search: the base model, the
best founder, their average, their sum, their vote, and random search that was allowed as many
candidates. Nothing here feeds back into the search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.genome.nursery import Nursery
from rookery.loops.genome.trials import Trials
from rookery.ports import Adapters
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.search.fitness import fitness_of, rank_key
from rookery.search.founders import random_plans
from rookery.search.statistics import Interval, Strata, bootstrap_mean, paired_difference
from rookery.search.streams import stream, stream_seed
from rookery.search.vote import vote_tasks
from rookery.types import Adapter, Group, ModelRef, Task
from rookery.weights.merge import LinearConfig, merge

__all__ = ["Entrant", "Finals", "FinalsConfig"]


class FinalsConfig(Config):
    """How the winner is chosen and what it is compared with."""

    num_finalists: int = Field(default=5, ge=1)
    """The best so many on the search split meet on the select split."""
    num_voters: int = Field(default=5, ge=1)
    """Size of the panels that vote: of the best founders, and of the finalists."""
    random_search: bool = True
    """Also try random merges of the founders, as many as the search tried candidates."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One line of the report: an adapter, or None for the base model."""

    name: str
    adapter: Adapter | None
    note: str = ""


class Finals:
    """The select and the report split, and the ones who meet there."""

    def __init__(
        self,
        evaluator: TasksetEvaluator,
        *,
        adapters: Adapters,
        base: ModelRef,
        nursery: Nursery,
        trials: Trials,
        weights: Mapping[str, float],
    ) -> None:
        self._evaluator = evaluator
        self._adapters = adapters
        self._base = base
        self._nursery = nursery
        self._trials = trials
        self._weights = dict(weights)

    async def choose(self, candidates: Sequence[str], tasks: Sequence[Task]) -> list[str]:
        """The candidates, best first by the select split; ties fall to the search split."""
        measured = self._trials.measured
        by_search = sorted(candidates, key=lambda c: rank_key(measured[c].fitness), reverse=True)
        if not tasks:
            return by_search
        groups = await self._rollout([self._nursery.adapter(c) for c in by_search], tasks)
        keys = {}
        for name, own in zip(by_search, groups, strict=True):
            means = mean_by_source(_rewards(own), tasks)
            if set(means) >= set(self._weights):
                fitness = fitness_of(means, weights=self._weights, floors=self._trials.floors)
                keys[name] = rank_key(fitness)
        return sorted(by_search, key=lambda name: keys.get(name, (0, 0.0)), reverse=True)

    def finalists(self, count: int) -> list[str]:
        """The best candidates of the search that saw every task."""
        measured = self._trials.measured
        complete = [name for name, m in measured.items() if m.is_complete]
        if not complete:
            errors = [m.error for m in measured.values() if m.error]
            raise TaskError(f"All {len(measured)} candidates failed. The first error: {errors[0]}")
        ranked = sorted(complete, key=lambda n: rank_key(measured[n].fitness), reverse=True)
        return ranked[:count]

    def founders(self) -> list[str]:
        """The founders that did not fail, best first by the search split."""
        measured = self._trials.measured
        alive = [f for f in self._nursery.founders if f in measured and not measured[f].error]
        return sorted(alive, key=lambda f: rank_key(measured[f].fitness), reverse=True)

    async def random_search(
        self, count: int, *, seed: int, finalists: int, tasks: Sequence[Task]
    ) -> str:
        """The winner of `count` random merges, chosen as the search's own winner is."""
        before = set(self._trials.measured)
        plans = random_plans(self._nursery.founders, count=count, seed=seed, merge="sum")
        self._nursery.plan(plans)
        for first in range(0, count, 16):
            part = [plan.id for plan in plans[first : first + 16]]
            drawn = [
                n for n, m in self._trials.measured.items() if n not in before and m.is_complete
            ]
            await self._trials.measure(
                part, rivals=drawn, seed=stream_seed(seed, "random", first), keep=finalists
            )
            self._nursery.keep(())
        own = [n for n, m in self._trials.measured.items() if n not in before and m.is_complete]
        own.sort(key=lambda n: rank_key(self._trials.measured[n].fitness), reverse=True)
        return (await self.choose(own[:finalists], tasks))[0]

    def merged(self, max_rank: int) -> list[Entrant]:
        """The average and the sum of all founders, exact as far as the rank allows."""
        parents = [self._nursery.adapter(f) for f in self._nursery.founders]
        if len(parents) < 2:
            return []
        rank = min(max_rank, sum(parent.rank for parent in parents))
        ones = [1.0] * len(parents)
        mean = merge(parents, weights=ones, method=LinearConfig(), rank=rank)
        total = merge(parents, weights=ones, method=LinearConfig(normalise=False), rank=rank)
        note = f"{len(parents)} founders, rank {rank}"
        return [
            Entrant("uniform average", replace(mean, name="uniform-average"), note),
            Entrant("plain sum", replace(total, name="plain-sum"), note),
        ]

    async def report(
        self,
        entrants: Sequence[Entrant],
        panels: Mapping[str, Sequence[str]],
        tasks: Sequence[Task],
        *,
        seed: int,
    ) -> list[dict[str, Any]]:
        """A row per entrant and per voting panel. The first entrant is the winner, the second
        the one that gains are counted from."""
        voters = list(dict.fromkeys(voter for panel in panels.values() for voter in panel))
        adapters = [e.adapter for e in entrants] + [self._nursery.adapter(v) for v in voters]
        groups = await self._rollout(adapters, tasks)
        rewards = {e.name: _rewards(g) for e, g in zip(entrants, groups, strict=False)}
        notes = {e.name: e.note for e in entrants}
        ballots = dict(zip(voters, groups[len(entrants) :], strict=True))
        for name, panel in panels.items():
            rewards[name] = _vote([ballots[voter] for voter in panel])
            notes[name] = f"{len(panel)} voters"
        reference = rewards[entrants[1].name]
        return [
            self._row(
                name, own, reference, tasks, seed=seed, note=notes[name], is_winner=place == 0
            )
            for place, (name, own) in enumerate(rewards.items())
        ]

    async def _rollout(
        self, adapters: Sequence[Adapter | None], tasks: Sequence[Task]
    ) -> list[list[Group]]:
        """Every task under every adapter, all in one batch."""
        refs = [self._base if a is None else await self._adapters.load(a) for a in adapters]
        try:
            groups = await self._evaluator.rollout(list(dict.fromkeys(refs)), tasks)
        finally:
            for ref in refs:
                if ref != self._base:
                    await self._adapters.unload(ref)
        by_ref: dict[ModelRef, list[Group]] = {}
        for group in groups:
            by_ref.setdefault(group.model, []).append(group)
        return [by_ref[ref] for ref in refs]

    def _row(
        self,
        name: str,
        rewards: Mapping[str, float],
        reference: Mapping[str, float],
        tasks: Sequence[Task],
        *,
        seed: int,
        note: str,
        is_winner: bool,
    ) -> dict[str, Any]:
        scored = [task for task in tasks if task.id in rewards]
        both = [task for task in scored if task.id in reference]
        mean = gain = None
        if scored:
            mean = bootstrap_mean(
                [rewards[t.id] for t in scored],
                rng=stream(seed, "report", name),
                strata=self._strata(scored),
            )
        if both and rewards is not reference:
            gain = paired_difference(
                [rewards[t.id] for t in both],
                [reference[t.id] for t in both],
                rng=stream(seed, "gain", name),
                strata=self._strata(both),
            )
        return {
            "name": name,
            "is_winner": is_winner,
            **_interval(mean),
            "gain": None if gain is None else _interval(gain),
            "by_source": mean_by_source(rewards, tasks),
            "num_failed": len(tasks) - len(scored),
            "note": note,
        }

    def _strata(self, tasks: Sequence[Task]) -> Strata:
        return Strata(names=tuple(task.source for task in tasks), weights=self._weights)


def _interval(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.estimate, "low": interval.low, "high": interval.high}


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward of each task that did not fail."""
    rewards = {}
    for group in groups:
        earned = [r.reward for r in group.rollouts if r.reward is not None]
        if len(earned) == len(group.rollouts):
            rewards[group.task.id] = sum(earned) / len(earned)
    return rewards


def _vote(ballots: Sequence[Sequence[Group]]) -> dict[str, float]:
    """What the majority's answer earned: the reward of the first voter who gave it."""
    answers = [
        {
            g.task.id: g.rollouts[0].completion.text if g.rollouts[0].completion else None
            for g in own
        }
        for own in ballots
    ]
    elected = vote_tasks(answers, count=len(answers))
    rewards: dict[str, float] = {}
    for own in ballots:
        for group in own:
            rollout = group.rollouts[0]
            is_elected = rollout.completion and rollout.completion.text == elected[group.task.id]
            if is_elected and rollout.reward is not None:
                rewards.setdefault(group.task.id, rollout.reward)
    return rewards
