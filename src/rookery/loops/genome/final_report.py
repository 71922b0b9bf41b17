"""The end of a run: choose on the select split, then measure on the report split, once.

The report compares the chosen candidate with baselines: the base model, the best founder, the
founders' average, sum and vote, and a random search with as many candidates. Nothing feeds back
into the search. An entry that fails on a task has no mean, as missing rewards are not averaged
away.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.comparison import Samples, compare, complete_means
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.generation_log import Cost
from rookery.loops.genome.search_evaluator import CandidateLoader, LoadFailure, SearchEvaluator
from rookery.reports import ReportRow, SampledRecord
from rookery.rollout import TasksetEvaluator
from rookery.search.candidate import FAILED, Fitness, fitness_of, rank_key
from rookery.search.merit import merits_of, vote
from rookery.search.population import random_plans
from rookery.seeding import stream_seed
from rookery.types import Adapter, Group, ModelRef, Rollout, Task
from rookery.weights.merge import LinearConfig, merge

__all__ = ["Choice", "FinalConfig", "FinalReport", "ReportEntry"]


class FinalConfig(Config):
    """The choice of the winner, and its baselines."""

    num_finalists: int = Field(default=5, ge=1)
    """Number of candidates, the best on the search split, that are compared on the select split."""
    num_voters: int = Field(default=5, ge=1)
    """Size of the voting panels: the best founders, and the best finalists."""
    evidence: Literal["both", "select"] = "select"
    """Basis of the choice among finalists: the select tasks, or both select and search tasks."""
    random_search: bool = True
    """Also try random merges of the founders, as many as the search tried candidates."""


_DEFAULTS = FinalConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """One row of the report: an adapter, the base model, or a voting panel."""

    name: str
    make: Callable[[], Adapter] | None = None
    """Makes the adapter, in any thread; None for the base model and panels."""
    voters: tuple[str, ...] = ()
    note: str = ""
    cost: Cost = field(default_factory=Cost)
    """Cost of finding it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Candidates ranked on the select split, best first."""

    ranked: tuple[str, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    """First error of each candidate that failed there. These rank last."""


class FinalReport:
    """Measures finalists on the select split and entries on the report split."""

    def __init__(
        self,
        evaluator: TasksetEvaluator,
        *,
        loader: CandidateLoader,
        base: ModelRef,
        builder: AdapterBuilder,
        search: SearchEvaluator,
        weights: Mapping[str, float],
        settings: FinalConfig = _DEFAULTS,
        samples: Samples | None = None,
    ) -> None:
        self._settings = settings
        self._samples = samples
        self._sampled: dict[str, SampledRecord] = {}
        """Results of the further answers for pass@k, by name."""
        self._evaluator = evaluator
        self._loader = loader
        self._base = base
        self._builder = builder
        self._search = search
        self._weights = dict(weights)

    def finalists(self, count: int) -> list[str]:
        """Return the best candidates that saw every task, the first of those with equal weights."""
        measured = self._search.measured
        complete = [name for name, m in measured.items() if m.is_complete]
        if not complete:
            errors = [m.error for m in measured.values() if m.error]
            raise TaskError(f"All {len(measured)} candidates failed. The first error: {errors[0]}")
        feasible = [name for name in complete if measured[name].fitness.violation == 0]
        ranked = sorted(
            feasible or complete, key=lambda n: rank_key(measured[n].fitness), reverse=True
        )
        distinct: dict[str | None, str] = {}
        for name in ranked:
            distinct.setdefault(self._builder.version(name), name)
        return list(distinct.values())[:count]

    def founders(self) -> list[str]:
        """Return the founders that did not fail, best first by the search split."""
        measured = self._search.measured
        alive = [f for f in self._builder.founders if f in measured and not measured[f].error]
        return sorted(alive, key=lambda f: rank_key(measured[f].fitness), reverse=True)

    async def choose(
        self,
        candidates: Sequence[str],
        tasks: Sequence[Task],
        *,
        floor_holders: Mapping[str, str],
    ) -> Choice:
        """Rank the candidates by merit on the select split. The search split breaks ties.

        A taskset without select tasks counts by its search tasks. `floor_holders` are founders
        whose mean on a source is the floor there, as in the search.
        """
        measured = self._search.measured
        by_search = sorted(candidates, key=lambda c: rank_key(measured[c].fitness), reverse=True)
        if not tasks:
            return Choice(ranked=tuple(by_search))
        names = list(dict.fromkeys([*by_search, *floor_holders.values()]))
        makers = {name: self._builder.maker(name) for name in names}
        groups = await self._rollout(makers, tasks, phase="select")
        evidence = {name: self._evidence(name, groups[name], tasks) for name in names}
        floors = dict(self._search.floors)
        for source, holder in floor_holders.items():
            floors[source] = evidence[holder].means.get(source, floors[source])
        # A taskset with only report tasks has no say in the choice.
        sources = {task.source for task in tasks} | self._search.sources
        fitness = {name: self._fitness(evidence[name], floors, sources) for name in by_search}
        ranked = sorted(by_search, key=lambda name: rank_key(fitness[name]), reverse=True)
        failed = [name for name in ranked if fitness[name].is_failed]
        return Choice(
            ranked=tuple(ranked), errors={name: _first_error(groups[name]) for name in failed}
        )

    def _evidence(self, name: str, groups: Sequence[Group], tasks: Sequence[Task]) -> "_Evidence":
        """Average by complete source. One without select tasks counts by its search tasks."""
        measured, asked = self._search.measured[name], {task.source for task in tasks}
        is_pooled = self._settings.evidence == "both"
        searched = [task for task in self._search.tasks if is_pooled or task.source not in asked]
        rewards = _rewards(groups)
        merits = merits_of(
            rewards,
            _certainties(groups),
            merit=self._search.merit,
            num_choices={task.id: len(task.choices) for task in tasks},
        )
        every = [*searched, *tasks]
        return _Evidence(
            means=complete_means({**measured.rewards, **rewards}, every),
            merits=complete_means({**measured.merits, **merits}, every, by_weight=True),
        )

    def _fitness(
        self, evidence: "_Evidence", floors: Mapping[str, float], sources: Set[str]
    ) -> Fitness:
        if not set(evidence.means) >= sources:
            return FAILED
        weights = {name: self._weights[name] for name in self._weights if name in sources}
        return fitness_of(evidence.means, weights=weights, floors=floors, merits=evidence.merits)

    async def random_search(self, count: int, *, seed: int, keep: int) -> list[str]:
        """Return the best `keep` of `count` candidates on the search split: the founders, their
        average and random sums. Empty if every sum failed."""
        founders = self._builder.founders
        plans = random_plans(founders, count=count - len(founders), seed=seed)
        self._builder.plan(plans)
        measured = self._search.measured
        names = [*founders, *(plan.id for plan in plans)]
        for first in range(len(founders), len(names), 16):
            before = [name for name in names[:first] if measured[name].is_complete]
            part, key = names[first : first + 16], stream_seed(seed, "random", first)
            await self._search.measure(part, rivals=before, seed=key, keep=keep)
            self._builder.keep(())
        complete = [name for name in names if measured[name].is_complete]
        if set(complete) <= set(founders):
            return []
        return sorted(complete, key=lambda n: rank_key(measured[n].fitness), reverse=True)[:keep]

    def merged(self, max_rank: int) -> list[ReportEntry]:
        """Return the average and the sum of all founders, exact up to the maximum rank."""
        parents = [self._builder.adapter(f) for f in self._builder.founders]
        if len(parents) < 2:
            return []
        rank = min(max_rank, sum(parent.rank for parent in parents))

        def make(name: str, method: LinearConfig) -> Adapter:
            ones = [1.0] * len(parents)
            return replace(merge(parents, weights=ones, method=method, rank=rank), name=name)

        methods = {"uniform average": LinearConfig(), "plain sum": LinearConfig(normalise=False)}
        return [
            ReportEntry(
                name=name,
                make=partial(make, name.replace(" ", "-"), method),
                note=f"{len(parents)} founders, rank {rank}",
                cost=Cost(num_candidates=1),
            )
            for name, method in methods.items()
        ]

    async def report(
        self, entries: Sequence[ReportEntry], tasks: Sequence[Task], *, seed: int
    ) -> list[ReportRow]:
        """Return a row per entry; none without tasks. Gains are over the second entry."""
        if not tasks:
            return []  # reserved for another run
        # Prefixes tell founders and entries of the same name apart.
        makers = {
            f"voter {voter}": self._builder.maker(voter)
            for entry in entries
            for voter in entry.voters
        }
        makers |= {f"entry {entry.name}": entry.make for entry in entries if entry.make is not None}
        groups = await self._rollout(makers, tasks, phase="report", seed=seed)
        rewards = {}
        for entry in entries:
            if entry.voters:
                panel = [groups[f"voter {voter}"] for voter in entry.voters]
                rewards[entry.name] = self.vote(panel)
            else:
                rewards[entry.name] = _rewards(groups[_key(entry)])
        rows = await asyncio.to_thread(compare, rewards, tasks, weights=self._weights, seed=seed)
        further = {
            entry.name: {
                "note": entry.note,
                "sampled": None if entry.voters else self._sampled.get(_key(entry)),
                **asdict(entry.cost),
            }
            for entry in entries
        }
        return [row.model_copy(update=further[row.name]) for row in rows]

    async def _rollout(
        self,
        makers: Mapping[str, Callable[[], Adapter]],
        tasks: Sequence[Task],
        *,
        phase: str,
        seed: int = 0,
    ) -> dict[str, list[Group]]:
        """Run every task under the base model and all adapters in one batch. An adapter that cannot
        be made or loaded fails on every task."""
        async with self._loader.load(makers, phase=phase) as arrivals:
            loaded = {name: await arrival for name, arrival in arrivals.items()}
            refs = {name: ref for name, ref in loaded.items() if isinstance(ref, ModelRef)}
            if phase == "report":
                refs[_BASE] = self._base
            groups = await self._evaluator.rollout(list(refs.values()), tasks)
            if phase == "report" and self._samples is not None:
                without_voters = {
                    name: ref for name, ref in refs.items() if not name.startswith("voter ")
                }
                self._sampled = await self._samples.measure(
                    self._evaluator, without_voters, tasks, weights=self._weights, seed=seed
                )
        count = len(tasks)
        answered = {name: groups[i * count : (i + 1) * count] for i, name in enumerate(refs)}
        failed = {n: fail.error for n, fail in loaded.items() if isinstance(fail, LoadFailure)}
        return answered | {name: _all_failed(tasks, error) for name, error in failed.items()}

    def vote(self, voters: Sequence[Sequence[Group]]) -> dict[str, float]:
        """Return the reward of the majority's answer by task, as given by the best voter. Voters
        with a failed or unreadable answer abstain."""
        rewards = {}
        for ballots in zip(*voters, strict=True):
            rollouts = [ballot.rollouts[0] for ballot in ballots if not ballot.rollouts[0].error]
            answers = [self._evaluator.read_answer(rollout) for rollout in rollouts]
            elected = vote(answers)
            earned = [r.reward for r, a in zip(rollouts, answers, strict=True) if a == elected]
            if earned and earned[0] is not None:
                rewards[ballots[0].task.id] = earned[0]
        return rewards


_BASE = "base"


def _key(entry: ReportEntry) -> str:
    """Return the key of an entry that is not a panel. The prefix avoids clashes with founders."""
    return _BASE if entry.make is None else f"entry {entry.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """A finalist's mean reward and mean merit by source, which decide the choice."""

    means: Mapping[str, float]
    merits: Mapping[str, float]


def _all_failed(tasks: Sequence[Task], error: str) -> list[Group]:
    nobody = ModelRef(name="failed", version="")
    return [
        Group(
            task=task,
            model=nobody,
            rollouts=(Rollout(task=task, completion=None, reward=None, error=error),),
        )
        for task in tasks
    ]


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean reward of each task without failures."""
    rewards = {}
    for group in groups:
        earned = [r.reward for r in group.rollouts if r.reward is not None]
        if len(earned) == len(group.rollouts):
            rewards[group.task.id] = sum(earned) / len(earned)
    return rewards


def _certainties(groups: Sequence[Group]) -> dict[str, float]:
    """Return the probability of the right choice, for tasks with choices."""
    certainties = {group.task.id: group.rollouts[0].metrics.get("certainty") for group in groups}
    return {task: certainty for task, certainty in certainties.items() if certainty is not None}


def _first_error(groups: Sequence[Group]) -> str:
    return next(r.error for group in groups for r in group.rollouts if r.error)
