"""The evolve loop: programs evolved by a language model.

    score the first programs
    until the iterations are done, or a target, patience or a budget ends it:
        plan: draw a parent, inspirations and a model             # search/programs
        generate: ask the model for a child of the parent          # proposer.py
        evaluate: score the child in a sandbox, somewhere          # program_evaluator.py
        commit the child to its island, or record why there is none
    spend as much on simpler searches                              # baselines.py
    report

Many attempts are in flight at a time: `scheduler.py` says how, and how a run resumes.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rookery.concurrency import run_in_thread
from rookery.errors import ConfigError
from rookery.loops.evolve.baselines import Start, run_baselines
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.first_program import FirstProgram
from rookery.loops.evolve.first_programs import (
    leave_out_failed,
    prepare_first_programs,
    tell_first_programs,
)
from rookery.loops.evolve.learning import Learner
from rookery.loops.evolve.outputs import OutputFormat, Outputs, log_to_file, open_outputs
from rookery.loops.evolve.parts import (
    UNWATCHED,
    Providers,
    Watcher,
    list_arms,
    open_learning,
    open_parts,
)
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.report import FinishedSearch, make_report
from rookery.loops.evolve.scheduler import AttemptScheduler
from rookery.loops.evolve.search_state import open_state
from rookery.ports import Embedder, Executor, TextModel
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.seeding import stream_seed

__all__ = ["EvolveResult", "evolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveResult:
    """What an evolution found."""

    report: EvolveReport
    best: ProgramRecord


async def evolve(
    config: EvolveConfig,
    *,
    programs: Sequence[FirstProgram | ProgramRecord],
    models: Mapping[str, TextModel],
    executor: Executor,
    run: Run,
    output_format: OutputFormat,
    watcher: Watcher = UNWATCHED,
    embedder: Embedder | None = None,
    learner: Learner | None = None,
    extended_from: int = 0,
) -> EvolveResult:
    """Evolve the programs until the iterations are done, or a target, a budget or patience ends it.

    Call it again with the same run to resume. `models` has the arms by the names that `llm.models`
    gives them, the judges too; a name that is not in the config is an arm of weight 1. A
    ProgramRecord, as from a checkpoint, is taken with the metrics it has; a FirstProgram is scored.
    `output_format` writes `best/`, the checkpoints and the trace. `embedder` is the config's
    `database.embedding_model`, `learner` trains for `rookery.learn`. `extended_from` is how many
    attempts were decided when the run had finished and more were asked for.
    """
    programs = leave_out_failed(programs, features=config.database.feature_dimensions)
    if not programs:
        raise ConfigError("An evolution needs a program to start from that has a score.")
    providers = Providers(
        models=models,
        executor=executor,
        run=run,
        watcher=watcher,
        language=programs[0].language,
        embedder=embedder,
        learner=learner,
    )
    with ExitStack() as stack:
        await run_in_thread(stack.enter_context, log_to_file(config, run.path))
        return await _evolve(
            config, programs, providers, output_format=output_format, extended_from=extended_from
        )


async def _evolve(
    config: EvolveConfig,
    programs: Sequence[FirstProgram | ProgramRecord],
    providers: Providers,
    *,
    output_format: OutputFormat,
    extended_from: int,
) -> EvolveResult:
    run = providers.run
    seed = await _seed(config, run)
    arms = list_arms(config, providers.models)
    parts = await open_parts(config, providers, seed=seed)
    state = open_state(config, database=None, seed=seed, arms=arms)
    state.extended_from = extended_from
    measured = await prepare_first_programs(programs, parts=parts, state=state)
    tell_first_programs(measured, programs, parts=parts, state=state)
    outputs = Outputs(
        config,
        run=run,
        store=parts.store,
        state=state,
        first=programs[0],
        output_format=output_format,
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
    start = Start(programs=programs, measured=measured, seed=seed, arms=arms)
    baselines = await run_baselines(config, providers, evolution=state, start=start)
    search = FinishedSearch(
        state=state, stop_reason=scheduler.stop_reason, elapsed_s=scheduler.elapsed_s
    )
    report = await run_in_thread(make_report, parts, search, baselines, seed=seed)
    await run_in_thread(run.write_json, "report.json", report.model_dump(mode="json"))
    best = await run_in_thread(parts.store.get, state.best.id)
    return EvolveResult(report=report, best=best)


async def _seed(config: EvolveConfig, run: Run) -> int:
    """The config's, or one that the run draws from its name and time, once."""
    if config.seed is not None:
        return config.seed
    drawn = stream_seed(0, run.name, str(run.created.time_s))
    event = await run.append("seed", {"seed": drawn}, key="seed")
    return int(event.payload["seed"])
