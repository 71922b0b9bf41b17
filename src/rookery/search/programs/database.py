"""The programs of an evolution: islands with feature grids, an archive, a front, arms.

    database = ProgramDatabase(DatabaseConfig(), seed=7, arms=[Arm(name="small")])
    database.tell(first_program)
    plan = database.ask(1)               # Plan: parent, inspirations, top programs, arm
    database.tell(record)                # or tell_failure(plan.arm, cost=1800)
    database = ProgramDatabase(config, seed=7, state=database.state)      # the same again

`ask` changes nothing: a plan follows from the seed, the attempt and what was told before, in that
order. A database is therefore its config and its tells: telling the same again in the order of
commits rebuilds it, and `state` saves the way. Cost does not grow with the number of programs.
For results that do not depend on the number of workers, order asks and tells by a `Window`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from rookery.search.programs.bandit import Arm, Bandit, BanditConfig
from rookery.search.programs.diversity import References
from rookery.search.programs.population import (
    Population,
    PopulationConfig,
    PopulationState,
)
from rookery.search.programs.program import CodeSummary, Member, ProgramRecord, score_of
from rookery.search.programs.sampling import (
    Elites,
    Plan,
    SamplingConfig,
    draw_inspirations,
    draw_parent,
)
from rookery.seeding import stream

__all__ = ["DatabaseConfig", "DatabaseState", "ProgramDatabase"]

BUILT_IN = ("complexity", "diversity", "score")
"""Features that need no metric; an evaluator's metric of the same name comes first."""


class DatabaseConfig(PopulationConfig):
    """OpenEvolve's `database` section, as far as search is concerned."""

    diversity_reference_size: int = Field(default=20, ge=1)
    """Programs that diversity is measured against."""
    sampling: SamplingConfig = SamplingConfig()
    bandit: BanditConfig = BanditConfig()

    def problem_with(self, metrics: Mapping[str, float]) -> str | None:
        """Why a program with these metrics cannot be told; None when it can."""
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
    """Programs told so far."""


class ProgramDatabase:
    """Programs kept for search, by id."""

    def __init__(
        self,
        config: DatabaseConfig,
        *,
        seed: int,
        arms: Iterable[Arm] = (),
        state: DatabaseState | None = None,
    ) -> None:
        """`arms` start a new database; a state brings its own."""
        self._config = config
        self._seed = seed
        self._num_told = state.num_told if state else 0
        self._population = Population(config, state=state.population if state else None)
        self._references = References(
            size=config.diversity_reference_size, summaries=state.references if state else ()
        )
        self._bandit = Bandit(config.bandit, arms=state.arms if state else arms)

    @property
    def state(self) -> DatabaseState:
        """A copy that later tells do not change."""
        return DatabaseState(
            population=self._population.state,
            references=self._references.summaries,
            arms=self._bandit.arms,
            num_told=self._num_told,
        )

    @property
    def members(self) -> Mapping[str, Member]:
        """All programs kept, by id."""
        return self._population.members

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The models and adapters, and what each earned."""
        return self._bandit.arms

    @property
    def best(self) -> Member | None:
        """The highest score of all, the first told of equal ones."""
        return self._population.best

    def problem_with(self, metrics: Mapping[str, float]) -> str | None:
        """Why a program with these metrics cannot be told; None when it can."""
        return self._config.problem_with(metrics)

    def ask(self, attempt: int) -> Plan:
        """The plan of an attempt; attempts count from 1."""
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

    def tell(self, record: ProgramRecord) -> Member:
        """Add a program that was evaluated, let migration happen if it is due, make room."""
        member = self._measure(record)
        if record.arm:
            before = member.score if record.parent_score is None else record.parent_score
            self._bandit.tell(record.arm, gain=max(0.0, member.score - before), cost=record.cost)
        self._num_told += 1
        self._references.add(record.code)
        self._population.add(member)
        return member

    def tell_failure(self, arm: str, *, cost: float) -> None:
        """Count an attempt without a program: it failed, or repeated another."""
        if arm:
            self._bandit.tell(arm, gain=0.0, cost=cost)

    def add_arm(self, arm: Arm) -> None:
        """Let a model or adapter join; part of what has to be told again."""
        self._bandit.add(arm)

    def _measure(self, record: ProgramRecord) -> Member:
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
