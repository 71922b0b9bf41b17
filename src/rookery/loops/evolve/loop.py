"""The evolve loop: programs evolved by a language model.

    score the first programs
    until the iterations are done, or a target, patience or a budget ends it:
        plan: draw a parent, inspirations and a model              # search/programs
        generate: ask the model for a child of the parent          # proposer.py
        evaluate: score the child in a sandbox                     # program_evaluator.py
        commit the child to its island, or record the failure
        every N iterations: train the model on its improvements    # learning.py
    run simpler searches with the same budget
    report

Many attempts are in flight at a time. `scheduler.py` runs them and resumes a run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveBudgetConfig, EvolveConfig
from rookery.loops.evolve.outputs import OutputFormat, Outputs, log_to_file, open_outputs
from rookery.loops.evolve.parts import (
    Iteration,
    Models,
    Providers,
    leave_out_failed,
    list_arms,
    open_learning,
    open_parts,
    prepare_first_programs,
    tell_first_programs,
)
from rookery.loops.evolve.problem import FirstProgram
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.prompt_tasks import PromptTasks, TaskAnswers, choose_prompt
from rookery.loops.evolve.report import FinishedSearch, export_training_data, make_report
from rookery.loops.evolve.scheduler import AttemptScheduler
from rookery.loops.evolve.search_state import SearchState, open_state, search_config
from rookery.loops.evolve.stages import Evaluated
from rookery.ports import UNOBSERVED, Executor, Observer
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread, together
from rookery.search.programs.bandit import Arm
from rookery.search.programs.database import BestOfN, ProgramDatabase, Sequential
from rookery.seeding import stream_seed

__all__ = ["BASELINES", "EvolveInputs", "evolve"]

WINNERS = "winners.jsonl"
"""File in the run's folder with the prompts and answers that improved a program."""
JOBS = 2**32
"""Job numbers of each search begin at a multiple of this, which exceeds any number of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveInputs:
    """The inputs of one evolution."""

    config: EvolveConfig
    programs: Sequence[FirstProgram | ProgramRecord]
    """A FirstProgram is scored. A ProgramRecord, such as a checkpoint's, keeps its metrics."""
    executor: Executor | None = None
    """Scores programs."""
    tasks: PromptTasks | None = None
    """Tasks that prompts are scored on, in place of the executor."""
    output_format: OutputFormat
    """Writes `best/`, the checkpoints and the trace."""
    extended_from: int = 0
    """Number of decided attempts when the finished run was extended."""


async def evolve(
    inputs: EvolveInputs,
    *,
    engine: Models,
    run: Run,
    observer: Observer[Iteration] = UNOBSERVED,
) -> EvolveReport:
    """Run or resume one evolution. Leaves the best program and the report in `run`."""
    config = inputs.config
    programs = leave_out_failed(inputs.programs, features=config.database.feature_dimensions)
    if not programs:
        raise ConfigError("An evolution needs a program to start from that has a score.")
    providers = Providers(
        engine=engine,
        executor=inputs.executor,
        run=run,
        observer=observer,
        language=programs[0].language,
        answers=_open_answers(inputs, engine, run),
    )
    with ExitStack() as stack:
        await run_in_thread(stack.enter_context, log_to_file(config, run.path))
        return await _evolve(replace(inputs, programs=programs), providers)


def _open_answers(inputs: EvolveInputs, engine: Models, run: Run) -> TaskAnswers | None:
    if inputs.tasks is None:
        return None
    config = inputs.config.rookery.tasks
    if config is None or engine.answerer is None:
        raise ConfigError("Prompts are scored on tasks: give rookery.tasks, and who answers them.")
    return TaskAnswers(inputs.tasks, config, answerer=engine.answerer, run=run)


async def _evolve(inputs: EvolveInputs, providers: Providers) -> EvolveReport:
    config, programs, run = inputs.config, inputs.programs, providers.run
    seed = await _seed(config, run)
    arms = list_arms(config, providers.engine.models)
    parts = await open_parts(config, providers, seed=seed)
    state = open_state(config, database=None, seed=seed, arms=arms)
    state.extended_from = inputs.extended_from
    if providers.answers is not None:
        state.spending.num_choice_rollouts = providers.answers.num_choice_rollouts
    measured = await prepare_first_programs(programs, parts=parts, state=state)
    tell_first_programs(measured, programs, parts=parts, state=state)
    outputs = Outputs(
        config,
        run=run,
        store=parts.store,
        state=state,
        first=programs[0],
        output_format=inputs.output_format,
    )
    await outputs.ensure_best()
    scheduler = AttemptScheduler(
        parts,
        state,
        num_attempts=config.max_iterations,
        outputs=outputs,
        learning=await open_learning(parts, providers, state, seed=seed),
    )
    async with open_outputs(outputs):
        await scheduler.run()
    start = _Start(programs=programs, measured=measured, seed=seed, arms=arms)
    baselines = await _run_baselines(config, providers, evolution=state, start=start)
    tasks = None
    if providers.answers is not None:
        tasks = await choose_prompt(providers.answers, state, store=parts.store, run=run, seed=seed)
        await outputs.write_best()
    search = _finished(scheduler, state)
    report = await run_in_thread(make_report, parts, search, baselines, seed=seed, tasks=tasks)
    await run_in_thread(_write_winners, run, config)
    await run_in_thread(run.write_json, "report.json", report.model_dump(mode="json"))
    return report


def _write_winners(run: Run, config: EvolveConfig) -> None:
    """Write the training rows for `rookery sft`, if any answer improved a program."""
    if rows := export_training_data(run, features=config.database.feature_dimensions):
        run.write_text(WINNERS, rows)


async def _seed(config: EvolveConfig, run: Run) -> int:
    """Return the config's seed, or draw one from the run's name and time and record it."""
    if config.seed is not None:
        return config.seed
    drawn = stream_seed(0, run.name, str(run.created.time_s))
    event = await run.append("seed", {"seed": drawn}, key="seed")
    return int(event.payload["seed"])


def _finished(scheduler: AttemptScheduler, state: SearchState, *, name: str = "") -> FinishedSearch:
    return FinishedSearch(
        name=name,
        state=state,
        stop_reason=scheduler.stop_reason,
        elapsed_s=scheduler.elapsed_s,
    )


# Baselines: simpler searches with the evolution's budget, which the evolution has to beat.
#
#   best_of_n     every attempt is a child of the first program and sees no other
#   sequential    every attempt is a child of the best program so far, one after the other
#   ...+tune      the same, and the numbers of each new best are tuned
#
# They use the same models and evaluator, and are series of attempts of their own. They end with the
# evolution's tokens, or with its number of iterations if a model reports no token counts.


BASELINES: dict[str, type[ProgramDatabase]] = {"best_of_n": BestOfN, "sequential": Sequential}
WITH_TUNE = "+tune"
MOST_TIMES = 4
"""Limit on a baseline's iterations, as a multiple of the evolution's. Baseline prompts show fewer
programs, so the tokens last longer, and `sequential` runs its attempts one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The starting point of every search of a run."""

    programs: Sequence[FirstProgram | ProgramRecord]
    measured: Sequence[Evaluated]
    seed: int
    arms: tuple[Arm, ...]


async def _run_baselines(
    config: EvolveConfig, providers: Providers, *, evolution: SearchState, start: _Start
) -> list[FinishedSearch]:
    """Run the configured baselines concurrently. Each resumes from its own events."""
    return await together(
        _run_baseline(
            name,
            _with_equal_budget(name, config, evolution),
            replace(providers, job_offset=number * JOBS),
            evolution,
            start,
        )
        for number, name in enumerate(config.rookery.baselines, start=1)
    )


async def _run_baseline(
    name: str, config: EvolveConfig, providers: Providers, evolution: SearchState, start: _Start
) -> FinishedSearch:
    # Same seeds would repeat the evolution's answers.
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
    return _finished(scheduler, state, name=name)


def _with_equal_budget(name: str, config: EvolveConfig, evolution: SearchState) -> EvolveConfig:
    """Return a config with one island, the evolution's tokens if known, and its hours once more."""
    is_known = not evolution.spending.num_unreported and evolution.spending.tokens
    budget = EvolveBudgetConfig(
        max_tokens=evolution.spending.tokens if is_known else None,
        max_hours=config.rookery.budget.max_hours,
    )
    database = config.database.model_copy(update={"num_islands": 1, "strategy": "openevolve"})
    tune = config.rookery.tune if name.endswith(WITH_TUNE) else None
    section = config.rookery.model_copy(update={"budget": budget, "tune": tune, "learn": None})
    return config.model_copy(
        update={"database": database, "rookery": section, "early_stopping_patience": None}
    )
