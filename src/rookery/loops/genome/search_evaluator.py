"""Candidates -> fitness on the search split. All of a generation are asked together.

With racing they are asked in waves, the same tasks for all, and those that can no longer survive
are dropped. Members of the population that have seen every task take part without being asked
again. On a remote engine, candidates are asked while others are still being made.

Candidates on their way into the engine: made in a thread, loaded, unloaded at the end.

    loader = CandidateLoader(engine, run=run)
    async with loader.load({"g001-c03": make}, phase="search") as arrivals:
        ref = await arrivals["g001-c03"]         # a ModelRef, or a LoadFailure

A candidate that cannot be made or loaded is recorded in the run, so that a resumed run finds it
failed as this one did.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

from rookery.concurrency import task_group, together
from rookery.errors import (
    AdapterError,
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    RookeryError,
    RunError,
    boundary,
)
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.ports import Adapters
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.runs import Run
from rookery.search import racing
from rookery.search.annealing import Waves
from rookery.search.candidate import FAILED, Fitness, find_violation, fitness_of, rank_key
from rookery.search.merit import Merit, merits_of
from rookery.search.racing import Race, RaceConfig
from rookery.seeding import stream
from rookery.types import Adapter, ModelRef, Task

__all__ = [
    "Arrivals",
    "CandidateLoader",
    "LoadFailure",
    "Measured",
    "SearchEvaluator",
    "check_repeated",
]


# A resumed run repeats its search; what does not come out as before is refused by name.
#
# check_repeated(run, "candidate", "g001-c03", {"version": adapter.version})


def check_repeated(run: Run, kind: str, key: str, values: Mapping[str, object]) -> None:
    """RunError unless these values are those that the run recorded, if it recorded any."""
    first = run.get(kind, key)
    if first is None:
        return
    for name, now in values.items():
        before = first.payload.get(name)
        if before != now:
            raise RunError(
                f"The run cannot be resumed here: {name} of {kind} {key} was {_show(before)} when "
                f"the run was made, and comes out as {_show(now)}. {_reason(first.payload)}"
            )


def _reason(payload: Mapping[str, object]) -> str:
    if payload.get("operator") == "founder":
        return "It is a founder: restore its files."
    return (
        "Children are computed again, and their last bits depend on the CPU, the version of torch "
        "and the number of threads. Resume the run where it was made, or start a new one."
    )


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a candidate is not in the engine, and its version if it could be made."""

    error: str
    version: str | None


Arrivals = Mapping[str, asyncio.Task[ModelRef | LoadFailure]]
"""Each candidate by name: done when the engine has it, or never will."""


class CandidateLoader:
    """Brings candidates into one engine, and knows which could not be."""

    def __init__(self, adapters: Adapters, *, run: Run) -> None:
        self._adapters = adapters
        self._run = run
        self._making = asyncio.Lock()  # one at a time: making one takes every core there is

    @asynccontextmanager
    async def load(
        self, makers: Mapping[str, Callable[[], Adapter]], *, phase: str
    ) -> AsyncIterator[Arrivals]:
        """Make and load in the order given, while the block goes on.

        `phase` (search, select, report) tells apart what one candidate met at different times.
        """

        async def bring(name: str, make: Callable[[], Adapter]) -> ModelRef | LoadFailure:
            key = f"{phase}/{name}"
            known = self._run.get("failure", key)
            if known is not None:
                return LoadFailure(known.payload["error"], known.payload["version"])
            version = None
            try:
                async with self._making:
                    adapter = await asyncio.to_thread(_make, name, make)
                version = adapter.version
                if phase == "search":  # before anything is asked of it
                    check_repeated(self._run, "candidate", name, {"version": version})
                return await self._adapters.load(adapter)
            except (EngineDownError, FleetDownError):
                raise
            except (AdapterError, EngineError, FleetError) as error:
                failure = LoadFailure(str(error), version)
                payload = {"candidate": name, **asdict(failure)}
                await self._run.append("failure", payload, key=key)
                return failure

        arrivals = {name: asyncio.create_task(bring(name, make)) for name, make in makers.items()}
        try:
            yield arrivals
        finally:
            for arrival in arrivals.values():
                arrival.cancel()
            ended = await asyncio.gather(*arrivals.values(), return_exceptions=True)
            await self._unload([ref for ref in ended if isinstance(ref, ModelRef)])

    async def _unload(self, refs: list[ModelRef]) -> None:
        """Every one of them. A failure to unload is logged and not raised."""
        unloads = (self._adapters.unload(ref) for ref in refs)
        for result in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(result, RookeryError):
                logger.warning("An adapter could not be unloaded: %s", result)
            elif isinstance(result, BaseException):
                raise result


def _make(name: str, make: Callable[[], Adapter]) -> Adapter:
    """Whatever stops a candidate from being made is a failure of this candidate."""
    with boundary(AdapterError, f"Making {name}"):
        return make()


COHORT = 64
"""Candidates in the engine at a time. More are measured one cohort after another, each against
the best of those before it: memory does not grow with the number of candidates."""

WAVE, REMOTE_WAVE = 64, 512
"""Answers asked for together in a race: what fills the engine here, and servers. Constants, so
that what is asked does not depend on the number of servers."""

MEMBER_ANSWERS = 8192
"""Answers of a population in flight on servers: more than any of them computes together. Members
come one after another with all their tasks, so that a batch has few adapters."""

NUM_REMOTE_WAVES = 4
"""Waves in flight on servers: at 7B a GPU answers four in about as long as making a child of whole
layers takes on a few cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate's result on the search split."""

    fitness: Fitness
    """What it is compared by: its score is made of merits, its violation of rewards."""
    rewards: Mapping[str, float]
    """By task id; fewer than all when it was dropped or failed."""
    merits: Mapping[str, float]
    """The same tasks."""
    certainties: Mapping[str, float]
    """Of these tasks the ones with choices."""
    mean: float | None
    """The weighted mean reward, which reports show: of a dropped one estimated from the tasks that
    it saw; None when it failed."""
    is_complete: bool
    error: str = ""


class SearchEvaluator:
    """The search split, and everything measured on it."""

    def __init__(
        self,
        evaluator: TasksetEvaluator,
        *,
        loader: CandidateLoader,
        builder: AdapterBuilder,
        tasks: Sequence[Task],
        weights: Mapping[str, float],
        race: RaceConfig,
        merit: Merit = "reward",
        is_remote: bool = False,
    ) -> None:
        self._evaluator = evaluator
        self._loader = loader
        self._builder = builder
        self._is_remote = is_remote
        self._tasks = {task.id: task for task in tasks}
        self._weights = dict(weights)
        self._race = race
        self.merit: Merit = merit
        self.num_choices: dict[str, int] = {}
        """By task id, of tasks whose right choice has a certainty: found when they are answered,
        because a scorer may judge a task with choices by its reward alone."""
        self._floors: dict[str, float] = {}
        self.measured: dict[str, Measured] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._merits: dict[str, dict[str, float]] = {}
        self._certainties: dict[str, dict[str, float]] = {}
        self._errors: dict[str, dict[str, str]] = {}
        self.num_members = 0
        """Members of populations that were measured, beside the candidates."""
        self.num_member_answers = 0
        self.member_errors: list[str] = []
        """Of each member that failed the first."""

    @property
    def tasks(self) -> Sequence[Task]:
        return list(self._tasks.values())

    @property
    def weights(self) -> Mapping[str, float]:
        """What each taskset counts."""
        return self._weights

    @property
    def sources(self) -> frozenset[str]:
        """The tasksets that are searched on."""
        return frozenset(self._weights)

    @property
    def floors(self) -> Mapping[str, float]:
        """Means that a candidate must not fall below, by source."""
        return self._floors

    def set_floors(self, floors: Mapping[str, float]) -> None:
        """Judge all candidates by these floors, including those measured before."""
        self._floors = dict(floors)
        for name, measured in self.measured.items():
            if not measured.error:
                fitness = self._fitness(measured.rewards, measured.merits, measured.fitness.score)
                self.measured[name] = replace(measured, fitness=fitness)

    def put_last(self, candidates: Iterable[str]) -> None:
        """Order `measured` by these: races at the same time end in any order, and what later stages
        start from must not depend on it."""
        for name in candidates:
            self.measured[name] = self.measured.pop(name)

    async def measure(
        self, candidates: Sequence[str], *, rivals: Sequence[str], seed: int, keep: int
    ) -> dict[str, Measured]:
        """Make and measure the candidates of these names; `keep` of all may survive."""
        before = list(rivals)
        for first in range(0, len(candidates), COHORT):
            cohort = candidates[first : first + COHORT]
            await self._measure_cohort(cohort, rivals=before, seed=seed, keep=keep)
            before += [name for name in cohort if self.measured[name].is_complete]
            if len(candidates) > COHORT:
                self._forget(candidates[: first + COHORT], keep=min(keep, COHORT))
        return {name: self.measured[name] for name in candidates}

    def _forget(self, candidates: Sequence[str], *, keep: int) -> None:
        """Let go of these adapters, but for the best and the centres of ES: the next ones are made
        of them, and to make one again takes all its ancestors that were let go."""
        ranked = sorted(
            candidates, key=lambda name: rank_key(self.measured[name].fitness), reverse=True
        )
        self._builder.forget(set(ranked[keep:]) - self._builder.chained)

    async def _measure_cohort(
        self, names: Sequence[str], *, rivals: Sequence[str], seed: int, keep: int
    ) -> None:
        in_turn = sorted(names, key=self._builder.effort)  # cheapest first: the engine has work
        makers = {name: self._builder.maker(name) for name in in_turn}
        known = {r: self.measured[r] for r in rivals if self.measured[r].is_complete}
        async with self._loader.load(makers, phase="search") as arrivals:
            race = await self._run(names, arrivals, known=known, seed=seed, keep=keep)
        estimates, means = race.estimates, race.reward_estimates
        for name in names:
            self.measured[name] = self._conclude(
                name, race, estimate=estimates[name], mean=means[name]
            )

    async def measure_members(
        self, members: Mapping[str, Callable[[], Adapter]], tasks: Sequence[str]
    ) -> dict[str, Measured]:
        """Measure members of a population, all on the same tasks, none against another. They are
        no candidates: nothing is made of them but the next centre, and nothing is kept."""
        names = list(members)
        size = 1 if self._is_remote else COHORT
        places = asyncio.Semaphore(max(1, MEMBER_ANSWERS // len(tasks)) if self._is_remote else 1)

        async def ask(group: Sequence[str]) -> None:
            makers = {name: members[name] for name in group}
            async with places, self._loader.load(makers, phase="search") as arrivals:
                await self._ask_batch(group, tasks, arrivals)

        await together(ask(names[i : i + size]) for i in range(0, len(names), size))
        self.num_members += len(names)
        self.num_member_answers += len(names) * len(tasks)
        measured = {name: self._conclude_member(name) for name in names}
        self.member_errors += [m.error for m in measured.values() if m.error]
        return measured

    def _conclude_member(self, name: str) -> Measured:
        rewards, merits = self._rewards.pop(name, {}), self._merits.pop(name, {})
        certainties, errors = self._certainties.pop(name, {}), self._errors.pop(name, {})
        fitness = FAILED if errors else self._fitness(rewards, merits, None)
        return Measured(
            fitness=fitness,
            rewards=rewards,
            merits=merits,
            certainties=certainties,
            mean=None if errors else self._fitness(rewards, rewards, None).score,
            is_complete=False,
            error=next(iter(errors.values()), ""),
        )

    def means(self, name: str) -> dict[str, float]:
        """A candidate's mean reward by source, of the tasks it saw."""
        return mean_by_source(self.measured[name].rewards, self._tasks.values())

    def plain_fitness(self, name: str) -> Fitness:
        """A candidate's fitness as its rewards alone would have it: what reports show."""
        measured = self.measured[name]
        return self._fitness(measured.rewards, measured.rewards, measured.mean)

    async def _run(
        self,
        candidates: Sequence[str],
        arrivals: Arrivals,
        *,
        known: Mapping[str, Measured],
        seed: int,
        keep: int,
    ) -> Race:
        """The race of one cohort: ask a wave of tasks, or several at a time, look, drop, ask on."""
        race = racing.start(
            [*known, *candidates],
            list(self._tasks),
            config=self._race.model_copy(update={"keep": max(self._race.keep, keep)}),
            rng=stream(seed, "race"),
            sources={task.id: task.source for task in self._tasks.values()},
            weights=self._weights,
            task_weights={task.id: task.weight for task in self._tasks.values()},
            floors=self._floors,
            known={name: measured.rewards for name, measured in known.items()},
            known_merits={name: measured.merits for name, measured in known.items()},
        )
        waves = Waves(race, size=self._wave)
        in_flight: list[asyncio.Task[_Told]] = []  # oldest first; drained below
        async with task_group() as asking:
            while True:
                while len(in_flight) < self._num_waves and (asks := waves.next()):
                    in_flight.append(asking.create_task(self._ask(asks, arrivals)))
                if not in_flight:
                    return race
                told = await in_flight.pop(0)
                rewards = {name: None if both is None else both[0] for name, both in told.items()}
                merits = {name: both[1] for name, both in told.items() if both is not None}
                await asyncio.to_thread(racing.tell, race, rewards, merits=merits)

    @property
    def _wave(self) -> int:
        """Answers of one wave: without a race everything is one wave."""
        if not self._race.enabled:
            return COHORT * len(self._tasks)
        return REMOTE_WAVE if self._is_remote else WAVE

    @property
    def _num_waves(self) -> int:
        """Servers have the next waves before the last one ends, also while a candidate of it is
        still being made: an empty server costs more than the answers of candidates that are
        dropped meanwhile."""
        return NUM_REMOTE_WAVES if self._is_remote else 1

    async def _ask(self, asks: Mapping[str, Sequence[str]], arrivals: Arrivals) -> "_Told":
        """The rewards and merits of each candidate on its tasks; None where it failed."""
        told: _Told = {}
        # Nearly always all candidates are asked for the same tasks: then this is one batch.
        for tasks in dict.fromkeys(tuple(tasks) for tasks in asks.values()):
            names = [name for name in asks if tuple(asks[name]) == tasks]
            for part in await together(
                self._ask_batch(batch, tasks, arrivals) for batch in self._batches(names, arrivals)
            ):
                told |= part
        return told

    def _batches(self, names: Sequence[str], arrivals: Arrivals) -> list[list[str]]:
        """Who is asked together: all, or those that are there and each of the others by itself."""
        late = [name for name in names if self._is_remote and not arrivals[name].done()]
        there = [name for name in names if name not in late]
        return [batch for batch in (there, *([name] for name in late)) if batch]

    async def _ask_batch(
        self, names: Sequence[str], tasks: Sequence[str], arrivals: Arrivals
    ) -> "_Told":
        told: _Told = dict.fromkeys(names)
        refs: dict[str, ModelRef] = {}
        for name in names:
            loaded = await arrivals[name]
            if isinstance(loaded, LoadFailure):
                self._errors.setdefault(name, {}).update(dict.fromkeys(tasks, loaded.error))
                self._builder.learn(name, loaded.version)
            else:
                refs[name] = loaded
        evaluations = await self._evaluator.evaluate(
            list(refs.values()), [self._tasks[task] for task in tasks]
        )
        num_choices = {task: len(self._tasks[task].choices) for task in tasks}
        for name, evaluation in zip(refs, evaluations, strict=True):
            self.num_choices |= {task: num_choices[task] for task in evaluation.certainties}
            self._certainties.setdefault(name, {}).update(evaluation.certainties)
            self._errors.setdefault(name, {}).update(evaluation.errors)
            rewards = evaluation.rewards
            merits = merits_of(
                rewards, evaluation.certainties, merit=self.merit, num_choices=num_choices
            )
            self._rewards.setdefault(name, {}).update(rewards)
            self._merits.setdefault(name, {}).update(merits)
            told[name] = ([rewards.get(task) for task in tasks], [merits.get(t) for t in tasks])
        return told

    def _conclude(
        self, name: str, race: Race, *, estimate: float | None, mean: float | None
    ) -> Measured:
        """What the race saw of a candidate. What was asked beyond that does not count."""
        fate = race.dropped.get(name)
        rewards, merits = self._rewards.pop(name, {}), self._merits.pop(name, {})
        certainties, errors = self._certainties.pop(name, {}), self._errors.pop(name, {})
        if fate is not None:
            seen = race.tasks[: fate.num_tasks]
            rewards, merits, certainties = (
                {task: of[task] for task in seen if task in of}
                for of in (rewards, merits, certainties)
            )
        if fate is not None and fate.reason == "failed":
            error = next(errors[task] for task in race.tasks if task in errors)
            return Measured(
                fitness=FAILED,
                rewards=rewards,
                merits=merits,
                certainties=certainties,
                mean=None,
                is_complete=False,
                error=error,
            )
        return Measured(
            fitness=self._fitness(rewards, merits, estimate),
            rewards=rewards,
            merits=merits,
            certainties=certainties,
            mean=self._fitness(rewards, rewards, mean).score,
            is_complete=len(rewards) == len(self._tasks),
        )

    def _fitness(
        self, rewards: Mapping[str, float], merits: Mapping[str, float], estimate: float | None
    ) -> Fitness:
        """From all tasks, or for a dropped candidate from those it saw and the race's estimate.
        Tasks count by their weights; for floors all alike."""
        means = mean_by_source(rewards, self._tasks.values())
        if set(means) >= set(self._weights):
            compared = mean_by_source(merits, self._tasks.values(), by_weight=True)
            fitness = fitness_of(means, weights=self._weights, floors=self._floors, merits=compared)
            if len(rewards) == len(self._tasks) or estimate is None:
                return fitness
            return replace(fitness, score=estimate)
        return Fitness(score=estimate, violation=find_violation(means, self._floors))


_Told = dict[str, tuple[list[float | None], list[float | None]] | None]
"""Rewards and merits in the order asked; None in place of one, or of all, says that it failed."""
