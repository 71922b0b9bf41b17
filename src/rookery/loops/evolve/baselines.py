"""Simpler searches with as much to spend as the evolution: what it has to beat.

best_of_n     every attempt is a child of the first program, and knows of no other
sequential    every attempt is a child of the best program so far, one after the other
...+tune      the same, and the numbers of every new best are tuned as the evolution's are

They ask the same models and the same evaluator, are attempts of the run in series of their own,
and end when they have spent the evolution's tokens; where a model does not count tokens, after the
evolution's number of iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rookery.concurrency import together
from rookery.loops.evolve.config import BudgetConfig, EvolveConfig
from rookery.loops.evolve.first_program import FirstProgram
from rookery.loops.evolve.first_programs import tell_first_programs
from rookery.loops.evolve.parts import Providers, open_parts
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.scheduler import AttemptScheduler
from rookery.loops.evolve.search_state import SearchState, open_state, search_config
from rookery.loops.evolve.stages import Evaluated
from rookery.search.programs.bandit import Arm
from rookery.search.programs.database import ProgramDatabase
from rookery.search.programs.program import Member
from rookery.search.programs.program import ProgramRecord as SearchedProgram
from rookery.search.programs.sampling import Plan
from rookery.seeding import stream_seed

__all__ = ["BASELINES", "Baseline", "BestOfN", "Sequential", "Start", "run_baselines"]


JOBS = 2**32
"""More than a search has attempts: numbers of its jobs begin at a multiple."""


class BestOfN(ProgramDatabase):
    """Independent children of the best first program, which a better child may have replaced among
    the members."""

    first: Member | None = None

    def tell(self, record: SearchedProgram) -> Member:
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
    """A line of programs: each a child of the best before it."""

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


BASELINES: dict[str, type[ProgramDatabase]] = {"best_of_n": BestOfN, "sequential": Sequential}
WITH_TUNE = "+tune"
MOST_TIMES = 4
"""Prompts of a baseline show fewer programs, so its tokens last for more iterations: at most so
many times the evolution's, as those of `sequential` come one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One baseline at its end."""

    name: str
    state: SearchState
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What every search of a run starts from."""

    programs: Sequence[FirstProgram | ProgramRecord]
    measured: Sequence[Evaluated]
    seed: int
    arms: tuple[Arm, ...]


async def run_baselines(
    config: EvolveConfig, providers: Providers, *, evolution: SearchState, start: Start
) -> list[Baseline]:
    """Those that the config names, at the same time; each resumes where it was."""
    return await together(
        _run(
            name,
            _same_spending(name, config, evolution),
            replace(providers, job_offset=number * JOBS),
            evolution,
            start,
        )
        for number, name in enumerate(config.rookery.baselines, start=1)
    )


async def _run(
    name: str, config: EvolveConfig, providers: Providers, evolution: SearchState, start: Start
) -> Baseline:
    # Of its own: a server that keeps to seeds would repeat the evolution's answers.
    seed = stream_seed(start.seed, "baseline", name)
    parts = await open_parts(config, providers, seed=seed)
    kind = name.removesuffix(WITH_TUNE)
    database = BASELINES[kind](search_config(config), seed=seed, arms=start.arms)
    state = open_state(config, database=database, seed=seed, arms=start.arms)
    if kind == "sequential":
        state.lag = 1
    tell_first_programs(start.measured, start.programs, parts=parts, state=state)
    series = name.replace(WITH_TUNE, "-tune")  # kinds of events have no plus
    times = 1 if config.rookery.budget.max_tokens is None else MOST_TIMES
    scheduler = AttemptScheduler(
        parts, state, num_attempts=times * evolution.num_decided, series=series
    )
    await scheduler.run()
    return Baseline(name=name, state=state, stop_reason=scheduler.stop_reason)


def _same_spending(name: str, config: EvolveConfig, evolution: SearchState) -> EvolveConfig:
    """One island, the tokens of the evolution where they are known, and as many hours again."""
    is_known = not evolution.spending.num_unreported and evolution.spending.tokens
    budget = BudgetConfig(
        max_tokens=evolution.spending.tokens if is_known else None,
        max_hours=config.rookery.budget.max_hours,
    )
    database = config.database.model_copy(update={"num_islands": 1, "strategy": "openevolve"})
    tune = config.rookery.tune if name.endswith(WITH_TUNE) else None
    own = config.rookery.model_copy(update={"budget": budget, "tune": tune, "learn": None})
    return config.model_copy(
        update={"database": database, "rookery": own, "early_stopping_patience": None}
    )
