"""The programs of an evolution: islands with feature grids, an archive, a front, arms.

    database = ProgramDatabase(ProgramDatabaseConfig(), seed=7, arms=[Arm(name="small")])
    database.tell(first_program)
    plan = database.ask(1)               # Plan: parent, inspirations, top programs, arm
    database.tell(record)                # or tell_failure(FailedRecord(...))
    database = ProgramDatabase(config, seed=7, state=database.state)      # the same again

`ask` changes nothing: a plan follows from the seed, the attempt and the order of earlier tells.
Telling the same records again in the order of commits rebuilds a database, and `state` saves that
work. The cost does not grow with the number of programs. If results must not depend on the number
of workers, order asks and tells by a `Window`.

A search stops early after a while without improvement, or at a target score:

stopping = Stopping()
stopping = advance(stopping, database.tell(record), config=config)
stopping.reason                                          # a sentence, or empty
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from pydantic import Field

from rookery.config import Config
from rookery.search.programs.bandit import Arm, Bandit, BanditConfig, OperatorRecord
from rookery.search.programs.island import Front
from rookery.search.programs.population import (
    Elites,
    ParentSamplingConfig,
    Plan,
    PopulationState,
    ProgramPopulation,
    ProgramPopulationConfig,
    draw_inspirations,
    draw_parent,
)
from rookery.search.programs.program import (
    COMBINED,
    CodeSummary,
    FailedRecord,
    Member,
    ScoredProgram,
    mean_of,
    score_of,
)
from rookery.seeding import stream

__all__ = [
    "Ask",
    "BestOfN",
    "DatabaseState",
    "ParetoDatabase",
    "ProgramDatabase",
    "ProgramDatabaseConfig",
    "References",
    "Sequential",
    "Stopping",
    "StoppingConfig",
    "Tell",
    "Window",
    "advance",
    "begin_again",
]


# Distance of a program to a few reference programs: the built-in feature `diversity`.
#
#     references = References(size=20)
#     diversity = references.measure(summary)
#     references.add(summary)
#
# References are the first programs told with different texts. So the cost of a measurement does not
# grow with the number of programs, and a value never changes afterwards.


class References:
    """The programs that diversity is measured against, at most `size`."""

    def __init__(self, *, size: int, summaries: Iterable[CodeSummary] = ()) -> None:
        self._size = size
        self._characters: dict[str, frozenset[str]] = {}
        self._summaries: list[CodeSummary] = []
        for summary in summaries:
            self.add(summary)

    @property
    def summaries(self) -> tuple[CodeSummary, ...]:
        return tuple(self._summaries)

    def add(self, summary: CodeSummary) -> None:
        """Make it a reference, unless there are enough or it is one already."""
        if len(self._summaries) < self._size and summary.digest not in self._characters:
            self._summaries.append(summary)
            self._characters[summary.digest] = frozenset(summary.characters)

    def measure(self, summary: CodeSummary) -> float:
        """Return the mean distance to the references with another text; 0 without any."""
        characters = frozenset(summary.characters)
        distances = [
            _distance(summary, characters, other, self._characters[other.digest])
            for other in self._summaries
            if other.digest != summary.digest
        ]
        return sum(distances) / len(distances) if distances else 0.0


def _distance(
    a: CodeSummary, a_characters: frozenset[str], b: CodeSummary, b_characters: frozenset[str]
) -> float:
    """OpenEvolve's estimate of an edit distance: differences of length, lines and characters."""
    return (
        0.1 * abs(a.num_chars - b.num_chars)
        + 10 * abs(a.num_newlines - b.num_newlines)
        + 0.5 * len(a_characters ^ b_characters)
    )


# The order of asks and tells that makes a search independent of the number of workers.
#
#     window = Window(width=16, num_attempts=1000)
#     while (step := window.next_step()) is not None:
#         match step:
#             case Ask(attempt=attempt): start(database.ask(attempt))
#             case Tell(attempt=attempt, result=result): tell(database, result)
#     # and whenever an attempt ends, failed ones too:
#     window.decide(attempt, result)
#
# Attempt k is asked when exactly the attempts up to k - width are told: an attempt that ends early
# waits for its turn. `width` belongs to the run and bounds the attempts in flight; it never changes
# with the number of workers.


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the database for this attempt now."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Generic[Result]):
    """Tell the database the result of this attempt now."""

    attempt: int
    result: Result


class Window(Generic[Result]):
    """Orders attempts, which count from 1. Deciding them again from the start repeats the steps."""

    def __init__(
        self,
        *,
        width: int,
        num_attempts: int,
        may_begin: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`may_begin` is called before each attempt and must depend only on earlier steps."""
        if width < 1:
            raise ValueError(f"Got width {width}: it is 1 or above; 1 is one attempt at a time.")
        self._width = width
        self._num_attempts = num_attempts
        self._may_begin = may_begin
        self._num_asked = 0
        self._num_told = 0
        self._decided: dict[int, Result] = {}

    @property
    def num_waiting(self) -> int:
        """Ended attempts that wait for their turn."""
        return len(self._decided)

    def decide(self, attempt: int, result: Result) -> None:
        """Hand in the result of an asked attempt; the first one counts."""
        if attempt > self._num_asked:
            raise ValueError(f"Attempt {attempt} is decided before it was asked.")
        if attempt > self._num_told:
            self._decided.setdefault(attempt, result)

    def stop(self) -> None:
        """Ask for no further attempt; attempts already asked are still told. Idempotent."""
        self._num_attempts = self._num_asked

    def next_step(self) -> Ask | Tell[Result] | None:
        """Return the next step; None if an attempt in flight has to end first."""
        is_open = self._num_asked < min(self._num_attempts, self._num_told + self._width)
        if is_open and self._may_begin(self._num_asked + 1):
            self._num_asked += 1
            return Ask(attempt=self._num_asked)
        if self._num_told + 1 in self._decided:
            self._num_told += 1
            return Tell(attempt=self._num_told, result=self._decided.pop(self._num_told))
        return None


BUILT_IN = ("complexity", "diversity", "score")
"""Features that need no metric; an evaluator's metric of the same name overrides them."""


class ProgramDatabaseConfig(ProgramPopulationConfig):
    """How programs are kept and drawn: the search's part of the section `database`."""

    diversity_reference_size: int = Field(default=20, ge=1)
    """Programs that diversity is measured against."""
    sampling: ParentSamplingConfig = ParentSamplingConfig()
    bandit: BanditConfig = BanditConfig()

    def problem_with(self, metrics: Mapping[str, float]) -> str | None:
        """Return why a program with these metrics cannot be told; None if it can."""
        if score_of(metrics, features=self.feature_dimensions) is None:
            return f"The metrics {dict(metrics)} have no score: a finite number is needed."
        features = [name for name in self.feature_dimensions if name not in BUILT_IN]
        for name in (*features, *self.objectives):
            if name not in metrics:
                return f"The evaluator reported no {name!r}, a dimension of the search."
        used = {*self.feature_dimensions, *self.objectives} & set(metrics)
        for name in sorted(used):
            if not math.isfinite(metrics[name]):
                return f"The metric {name!r}, a dimension of the search, is {metrics[name]}."
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """A database as a value."""

    population: PopulationState
    references: tuple[CodeSummary, ...] = ()
    arms: tuple[Arm, ...] = ()
    num_told: int = 0


class ProgramDatabase:
    """The programs of a search, by id."""

    def __init__(
        self,
        config: ProgramDatabaseConfig,
        *,
        seed: int,
        arms: Iterable[Arm] = (),
        state: DatabaseState | None = None,
    ) -> None:
        """`arms` start a new database; a state has its own."""
        self._config = config
        self._seed = seed
        self._num_told = state.num_told if state else 0
        self._population = ProgramPopulation(config, state=state.population if state else None)
        self._references = References(
            size=config.diversity_reference_size, summaries=state.references if state else ()
        )
        self._bandit = Bandit(config.bandit, arms=state.arms if state else arms)

    @property
    def state(self) -> DatabaseState:
        """A copy, independent of later tells."""
        return DatabaseState(
            population=self._population.state,
            references=self._references.summaries,
            arms=self._bandit.arms,
            num_told=self._num_told,
        )

    @property
    def members(self) -> Mapping[str, Member]:
        return self._population.members

    @property
    def arms(self) -> tuple[Arm, ...]:
        return self._bandit.arms

    @property
    def operators(self) -> tuple[OperatorRecord, ...]:
        """The operators with their results; empty if none are drawn."""
        return ()

    @property
    def best(self) -> Member | None:
        """The program of the highest score, the earliest of equals."""
        return self._population.best

    def problem_with(self, metrics: Mapping[str, float]) -> str | None:
        """Return why a program with these metrics cannot be told; None if it can."""
        return self._config.problem_with(metrics)

    def ask(self, attempt: int) -> Plan:
        """Return the plan of an attempt; attempts count from 1."""
        if not self.members:
            raise ValueError("Nothing was told yet: tell the programs to start from first.")
        rng = stream(self._seed, "program", attempt)
        population, sampling = self._population, self._config.sampling
        number = (attempt - 1) % len(population.islands)
        island = population.islands[number]
        elites = Elites(archive=population.archive, front=population.front)
        parent = self.members[draw_parent(island, elites=elites, config=sampling, rng=rng)]
        return Plan(
            attempt=attempt,
            island=number,
            parent=parent.id,
            parent_score=parent.score,
            generation=parent.record.generation + 1,
            inspirations=draw_inspirations(
                island, parent=parent, space=population.space, config=sampling, rng=rng
            ),
            top=(island.ranking if len(island) else population.archive).best(sampling.num_top),
            arm=self._bandit.draw(stream(self._seed, "arm", attempt)),
        )

    def tell(self, record: ScoredProgram) -> Member:
        """Add an evaluated program, make room for it, and migrate if it is time."""
        member = self._measure(record)
        if record.arm:
            before = member.score if record.parent_score is None else record.parent_score
            self._bandit.tell(record.arm, gain=max(0.0, member.score - before), cost=record.cost)
        self._num_told += 1
        self._references.add(record.code)
        self._population.add(member)
        return member

    def tell_failure(self, failed: FailedRecord) -> None:
        """Count an attempt without a program."""
        if failed.arm:
            self._bandit.tell(failed.arm, gain=0.0, cost=failed.cost)

    def add_arm(self, arm: Arm) -> None:
        """Add a model or adapter; a rebuild must repeat this."""
        self._bandit.add(arm)

    def join_arm(self, arm: Arm, *, retires: Collection[str] = ()) -> None:
        """Add a model or adapter to a running search: see `Bandit.join`."""
        self._bandit.join(arm, retires=retires)

    def _measure(self, record: ScoredProgram) -> Member:
        if record.id in self.members:
            raise ValueError(f"The program {record.id!r} was told before.")
        if not 0 <= record.island < self._config.num_islands:
            raise ValueError(
                f"Got island {record.island}: there are 0 to {self._config.num_islands - 1}."
            )
        problem = self.problem_with(record.metrics)
        if problem is not None:
            raise ValueError(f"{problem} Tell it as a failure.")
        score = score_of(record.metrics, features=self._config.feature_dimensions)
        assert score is not None
        values = {
            "complexity": float(record.code.num_chars),
            "diversity": self._references.measure(record.code),
            "score": score,
            **record.metrics,
        }
        features = tuple(values[name] for name in self._config.feature_dimensions)
        return Member(record=record, serial=self._num_told, score=score, features=features)


class ParetoDatabase(ProgramDatabase):
    """A search of prompts: parents are best on some task, drawn by the number of such tasks."""

    def __init__(
        self, config: ProgramDatabaseConfig, *, seed: int, arms: Iterable[Arm] = ()
    ) -> None:
        super().__init__(config, seed=seed, arms=arms)
        self._front = Front(size=None)
        self._parents: dict[str, Member] = {}
        """Members of the front, which the population may have removed."""

    def tell(self, record: ScoredProgram) -> Member:
        member = super().tell(record)
        change = self._front.add(member.id, record.rewards)
        if change.is_member:
            self._parents[member.id] = member
        for id in change.removed:
            del self._parents[id]
        return member

    def ask(self, attempt: int) -> Plan:
        rng = stream(self._seed, "parent", attempt)
        parent = self._parents[self._front.draw_by_wins(rng)]
        return replace(
            super().ask(attempt),
            parent=parent.id,
            parent_score=parent.score,
            generation=parent.record.generation + 1,
            inspirations=(),
            top=(),
        )


# Simpler searches as baselines.


class BestOfN(ProgramDatabase):
    """Independent children of the best first program, even if the population dropped it."""

    first: Member | None = None

    def tell(self, record: ScoredProgram) -> Member:
        member = super().tell(record)
        if record.attempt == 0 and (self.first is None or member.rank < self.first.rank):
            self.first = member
        return member

    def ask(self, attempt: int) -> Plan:
        plan, first = super().ask(attempt), self.first
        assert first is not None
        return replace(
            plan,
            parent=first.id,
            parent_score=first.score,
            generation=1,
            inspirations=(),
            top=(),
        )


class Sequential(ProgramDatabase):
    """A line of programs: each is a child of the best before it."""

    def ask(self, attempt: int) -> Plan:
        plan, best = super().ask(attempt), self.best
        assert best is not None
        return replace(
            plan,
            parent=best.id,
            parent_score=best.score,
            generation=best.record.generation + 1,
            inspirations=(),
        )


class StoppingConfig(Config):
    """The rules of `early_stopping_*`, `convergence_threshold` and `target_score`."""

    patience: int | None = None
    """Stop after this many programs in a row without improvement; 0 or below stops when the metric
    equals `threshold`; null never stops."""
    threshold: float = 0.001
    """Least improvement that counts, or the value to reach."""
    metric: str = Field(default=COMBINED, min_length=1)
    """Watched metric; if a program lacks it, the mean of all its metrics."""
    target_score: float | None = None
    """Stop when a program's score is at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """State of early stopping."""

    best: float | None = None
    num_without_improvement: int = 0
    reason: str = ""
    """Why the search should stop; empty if it should go on."""


def advance(stopping: Stopping, member: Member, *, config: StoppingConfig) -> Stopping:
    """Return the state after one more program; failed attempts do not count."""
    value = _watched(member.record.metrics, config.metric)
    best, count = stopping.best, stopping.num_without_improvement
    if value is not None:
        is_better = best is None or value - best >= config.threshold
        best, count = (value, 0) if is_better else (best, count + 1)
    reason = stopping.reason or _reason(member.score, value, count, config)
    return Stopping(best=best, num_without_improvement=count, reason=reason)


def begin_again(stopping: Stopping, best: Member, *, config: StoppingConfig) -> Stopping:
    """Reset patience for a search that ended and resumes; a reached target stays reached."""
    is_reached = config.target_score is not None and best.score >= config.target_score
    return Stopping(best=stopping.best, reason=stopping.reason if is_reached else "")


def _reason(score: float, value: float | None, count: int, config: StoppingConfig) -> str:
    if config.target_score is not None and score >= config.target_score:
        return f"The score {score:.6g} reached the target {config.target_score:.6g}."
    if config.patience is None:
        return ""
    if config.patience <= 0:
        is_reached = value == config.threshold
        return f"{config.metric} reached {config.threshold:.6g}." if is_reached else ""
    if count < config.patience:
        return ""
    return f"{config.metric} did not improve by {config.threshold:.6g} in {count} programs."


def _watched(metrics: Mapping[str, float], name: str) -> float | None:
    return mean_of([metrics[name]] if name in metrics else list(metrics.values()))
