"""Candidates -> fitness on the search split. A generation is asked together.

A race asks in waves, the same tasks for all, and drops candidates that can no longer survive.
Members that have seen every task take part without being asked again. A remote engine is asked
while other candidates are still being made.

A CandidateLoader makes candidates in a thread, loads them, and unloads them at the end:

    loader = CandidateLoader(engine, run=run)
    async with loader.load({"g001-c03": make}, phase="search") as arrivals:
        ref = await arrivals["g001-c03"]         # a ModelRef, or a LoadFailure

A candidate that cannot be made or loaded is recorded, so that it fails in a resumed run too.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

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
from rookery.runtime.concurrency import task_group, together
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


def check_repeated(run: Run, kind: str, key: str, values: Mapping[str, object]) -> None:
    """Raise RunError if the run recorded other values: a resumed run must repeat its search
    exactly.

        check_repeated(run, "candidate", "g001-c03", {"version": adapter.version})
    """
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
    """Error of a candidate that is not in the engine, and its version if it was made."""

    error: str
    version: str | None


Arrivals = Mapping[str, asyncio.Task[ModelRef | LoadFailure]]
"""Tasks by candidate name. Each is done once the engine has the candidate or it failed."""


class CandidateLoader:
    """Loads candidates into one engine, and remembers failures."""

    def __init__(self, adapters: Adapters, *, run: Run) -> None:
        self._adapters = adapters
        self._run = run
        self._making = asyncio.Lock()  # one at a time, as making takes every core
        self._failures = {
            event.key: LoadFailure(event.payload["error"], event.payload["version"])
            for event in run.events("failure")
        }

    @asynccontextmanager
    async def load(
        self, makers: Mapping[str, Callable[[], Adapter]], *, phase: str, are_members: bool = False
    ) -> AsyncIterator[Arrivals]:
        """Make and load the candidates in order, while the block runs. With `are_members` they are
        members of a population, named by seeds: no candidates, and made at once.

        `phase` (search, select, report) separates a candidate's failures at different times.
        """

        async def bring(name: str, make: Callable[[], Adapter]) -> ModelRef | LoadFailure:
            key = f"{phase}/{name}"
            if key in self._failures:
                return self._failures[key]
            version = None
            try:
                if are_members:
                    adapter = _make(name, make)
                else:
                    async with self._making:
                        adapter = await asyncio.to_thread(_make, name, make)
                version = adapter.version
                if phase == "search" and not are_members:  # before it gets any request
                    check_repeated(self._run, "candidate", name, {"version": version})
                return await self._adapters.load(adapter)
            except (EngineDownError, FleetDownError):
                raise
            except (AdapterError, EngineError, FleetError) as error:
                failure = LoadFailure(str(error), version)
                payload = {"candidate": name, **asdict(failure)}
                await self._run.append("failure", payload, key=key)
                self._failures[key] = failure
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
        """Unload all. Failures are logged, not raised."""
        unloads = (self._adapters.unload(ref) for ref in refs)
        for result in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(result, RookeryError):
                logger.warning("An adapter could not be unloaded: %s", result)
            elif isinstance(result, BaseException):
                raise result


def _make(name: str, make: Callable[[], Adapter]) -> Adapter:
    """Make a candidate. Any error becomes a failure of this candidate."""
    with boundary(AdapterError, f"Making {name}"):
        return make()


COHORT = 64
"""Candidates in the engine at a time. Further ones follow in cohorts, each raced against the best
before it, so that memory does not grow with the number of candidates."""

WAVE, REMOTE_WAVE = 64, 512
"""Answers per wave, here and on servers. Constants, as requests must not depend on server count."""

MEMBER_ANSWERS = 8192
"""Answers of a population in flight on servers, more than any of them computes together. Each
member gets all its tasks at once, so that a batch has few adapters."""

NUM_REMOTE_WAVES = 4
"""Waves in flight on servers. At 7B, a GPU answers four in about the time that a few cores need to
make a child of whole layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate's result on the search split."""

    fitness: Fitness
    """Basis of comparison: the score from merits, the violation from rewards."""
    rewards: Mapping[str, float]
    """Rewards by task id; incomplete if the candidate was dropped or failed."""
    merits: Mapping[str, float]
    """Merits of the same tasks."""
    certainties: Mapping[str, float]
    """Certainties of those tasks that have choices."""
    mean: float | None
    """Weighted mean reward. An estimate if the candidate was dropped; None if it failed."""
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
        """Number of choices by task id, for tasks with a certainty. Known once they are answered,
        because a scorer may judge a task with choices by reward alone."""
        self._floors: dict[str, float] = {}
        self.measured: dict[str, Measured] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._merits: dict[str, dict[str, float]] = {}
        self._certainties: dict[str, dict[str, float]] = {}
        self._errors: dict[str, dict[str, str]] = {}
        self.num_members = 0
        """Population members measured, not counted as candidates."""
        self.num_member_answers = 0
        self.member_errors: list[str] = []
        """First error of each failed member."""

    @property
    def tasks(self) -> Sequence[Task]:
        return list(self._tasks.values())

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each taskset."""
        return self._weights

    @property
    def sources(self) -> frozenset[str]:
        """Names of the searched tasksets."""
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
        """Move these to the end of `measured`, in this order: concurrent races end in any order,
        and later stages must not depend on it."""
        for name in candidates:
            self.measured[name] = self.measured.pop(name)

    async def measure(
        self, candidates: Sequence[str], *, rivals: Sequence[str], seed: int, keep: int
    ) -> dict[str, Measured]:
        """Make and measure the named candidates. At most `keep` of all may survive."""
        before = list(rivals)
        for first in range(0, len(candidates), COHORT):
            cohort = candidates[first : first + COHORT]
            await self._measure_cohort(cohort, rivals=before, seed=seed, keep=keep)
            before += [name for name in cohort if self.measured[name].is_complete]
            if len(candidates) > COHORT:
                self._forget(candidates[: first + COHORT], keep=min(keep, COHORT))
        return {name: self.measured[name] for name in candidates}

    def _forget(self, candidates: Sequence[str], *, keep: int) -> None:
        """Forget adapters except the best and ES centres: the next candidates derive from these,
        and making one again requires its forgotten ancestors."""
        ranked = sorted(
            candidates, key=lambda name: rank_key(self.measured[name].fitness), reverse=True
        )
        self._builder.forget(set(ranked[keep:]) - self._builder.chained)

    async def _measure_cohort(
        self, names: Sequence[str], *, rivals: Sequence[str], seed: int, keep: int
    ) -> None:
        in_turn = sorted(
            names, key=self._builder.effort
        )  # cheapest first: the engine gets work early
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
        """Measure population members on the same tasks, without a race. They are not candidates:
        they serve only to compute the next centre."""
        names = list(members)
        size = 1 if self._is_remote else COHORT
        places = asyncio.Semaphore(max(1, MEMBER_ANSWERS // len(tasks)) if self._is_remote else 1)

        async def ask(group: Sequence[str]) -> None:
            # Functions, not members: a member that an engine has read keeps all its numbers.
            makers = {name: members[name] for name in group}
            loading = self._loader.load(makers, phase="search", are_members=True)
            async with places, loading as arrivals:
                await self._ask_batch(group, tasks, arrivals)

        async with task_group() as group:
            for first in range(0, len(names), size):
                group.create_task(ask(names[first : first + size]))
                # Others go on: the first are asked before all are prepared.
                await asyncio.sleep(0)
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
        """Return a candidate's mean reward by source, over the tasks it saw."""
        return mean_by_source(self.measured[name].rewards, self._tasks.values())

    def plain_fitness(self, name: str) -> Fitness:
        """Return a candidate's fitness from rewards alone, as reports show it."""
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
        """Race one cohort: ask waves of tasks, drop losers, continue."""
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
        in_flight: list[asyncio.Task[_Answers]] = []  # oldest first; drained below
        async with task_group() as asking:
            while True:
                while len(in_flight) < self._num_waves and (asks := waves.next()):
                    in_flight.append(asking.create_task(self._ask(asks, arrivals)))
                if not in_flight:
                    return race
                answers = await in_flight.pop(0)
                rewards = {
                    name: None if both is None else both[0] for name, both in answers.items()
                }
                merits = {name: both[1] for name, both in answers.items() if both is not None}
                await asyncio.to_thread(racing.tell, race, rewards, merits=merits)

    @property
    def _wave(self) -> int:
        """Answers per wave. Without a race, everything is one wave."""
        if not self._race.enabled:
            return COHORT * len(self._tasks)
        return REMOTE_WAVE if self._is_remote else WAVE

    @property
    def _num_waves(self) -> int:
        """Waves in flight. Servers get the next waves early, even while a candidate is still being
        made: an idle server costs more than answers of candidates that are dropped."""
        return NUM_REMOTE_WAVES if self._is_remote else 1

    async def _ask(self, asks: Mapping[str, Sequence[str]], arrivals: Arrivals) -> "_Answers":
        """Return each candidate's rewards and merits on its tasks, or None if it failed."""
        answers: _Answers = {}
        # Nearly always all candidates have the same tasks, which gives one batch.
        for tasks in dict.fromkeys(tuple(tasks) for tasks in asks.values()):
            names = [name for name in asks if tuple(asks[name]) == tasks]
            for part in await together(
                self._ask_batch(batch, tasks, arrivals) for batch in self._batches(names, arrivals)
            ):
                answers |= part
        return answers

    def _batches(self, names: Sequence[str], arrivals: Arrivals) -> list[list[str]]:
        """Batch the candidates that are loaded. On servers, each other one is its own batch."""
        late = [name for name in names if self._is_remote and not arrivals[name].done()]
        loaded = [name for name in names if name not in late]
        return [batch for batch in (loaded, *([name] for name in late)) if batch]

    async def _ask_batch(
        self, names: Sequence[str], tasks: Sequence[str], arrivals: Arrivals
    ) -> "_Answers":
        answers: _Answers = dict.fromkeys(names)
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
            answers[name] = ([rewards.get(task) for task in tasks], [merits.get(t) for t in tasks])
        return answers

    def _conclude(
        self, name: str, race: Race, *, estimate: float | None, mean: float | None
    ) -> Measured:
        """Return what the race saw of a candidate. Answers beyond that do not count."""
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
        """Compute fitness from all tasks, or for a dropped candidate from those it saw and the
        race's estimate. Scores use task weights, floors do not."""
        means = mean_by_source(rewards, self._tasks.values())
        if set(means) >= set(self._weights):
            compared = mean_by_source(merits, self._tasks.values(), by_weight=True)
            fitness = fitness_of(means, weights=self._weights, floors=self._floors, merits=compared)
            if len(rewards) == len(self._tasks) or estimate is None:
                return fitness
            return replace(fitness, score=estimate)
        return Fitness(score=estimate, violation=find_violation(means, self._floors))


_Answers = dict[str, tuple[list[float | None], list[float | None]] | None]
"""Rewards and merits by candidate, in the order asked. None marks a failed task or candidate."""
