"""The parts of a run's searches: models, evaluator, proposer and first programs."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, ModelConfig
from rookery.loops.evolve.learning import Learner, Learning
from rookery.loops.evolve.problem import FirstProgram
from rookery.loops.evolve.program import ProgramRecord, ProgramStore, has_large
from rookery.loops.evolve.program_evaluator import Judge, Judges, Lease, ProgramEvaluator
from rookery.loops.evolve.prompt_tasks import Answerer, PromptEvaluator, Reflection, TaskAnswers
from rookery.loops.evolve.prompts import Prompts
from rookery.loops.evolve.proposer import (
    UNCOMPARED,
    Comparison,
    Endpoint,
    Novelty,
    NoveltyJudge,
    Proposer,
    make_child,
)
from rookery.loops.evolve.search_state import ADAPTER_NAME, SearchState
from rookery.loops.evolve.stages import Evaluated, from_data, to_data
from rookery.ports import Embedder, Executor, Observer, TextModel
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread, together
from rookery.search.es import load_library
from rookery.search.programs.bandit import Arm
from rookery.search.programs.program import COMBINED, numeric_metrics, score_of

__all__ = [
    "FIRST_PROGRAM",
    "Iteration",
    "Models",
    "Providers",
    "SearchParts",
    "first_id",
    "leave_out_failed",
    "list_arms",
    "open_learning",
    "open_parts",
    "prepare_first_programs",
    "tell_first_programs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One decided iteration: a program, or a failure with its reason."""

    series: str = ""
    """Name of the baseline; empty for the evolution."""
    number: int
    num_decided: int
    """Decided iterations, including this one."""
    num_iterations: int
    """Planned iterations. The run may end earlier."""
    model: str
    program: str = ""
    """Id of the program; empty after a failure."""
    score: float | None = None
    best_score: float
    is_best: bool = False
    failure: str = ""
    """Kind of failure; empty for a program."""
    message: str = ""
    """Explanation of the failure."""
    tokens: int | None = None
    """Tokens of prompt and answer; None if the model does not report them."""
    evaluation_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of an evolution: the engine of this loop."""

    models: Mapping[str, TextModel]
    """Models by their names in `llm.models`, judges too. Other names become arms of weight 1."""
    embedder: Embedder | None = None
    """Embeds programs for `database.embedding_model`."""
    learner: Learner | None = None
    """Trains adapters for `rookery.learn`."""
    answerer: Answerer | None = None
    """Answers the tasks of `rookery.tasks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Everything that the loop's caller provides."""

    engine: Models
    executor: Executor | None
    run: Run
    observer: Observer[Iteration]
    language: str
    job_offset: int = 0
    """Added to job numbers, because concurrent searches share the executor."""
    answers: TaskAnswers | None = None
    """Scores prompts in place of the executor; None for programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParts:
    """The parts of one search. Its own `store` finds programs by id."""

    config: EvolveConfig
    run: Run
    store: ProgramStore
    proposer: Proposer
    evaluator: ProgramEvaluator | PromptEvaluator
    observer: Observer[Iteration]
    novelty: Novelty | None = None
    """None: programs are not compared by embedding."""


def list_arms(config: EvolveConfig, models: Mapping[str, TextModel]) -> tuple[Arm, ...]:
    """Return the models that propose programs, with their weights."""
    weights = {model.name: model.weight for model in config.llm.ensemble}
    judges = {model.name for model in config.llm.judges}
    names = [name for name in models if name in weights or name not in judges]
    if missing := [name for name in weights if name not in models]:
        raise ConfigError(f"The config names the model {missing[0]!r}, and it was not opened.")
    if not any(weights.get(name, 1.0) > 0 for name in names):
        raise ConfigError("An evolution needs a model with a weight above 0 to ask.")
    return tuple(Arm(name=name, weight=weights.get(name, 1.0)) for name in names)


async def open_parts(config: EvolveConfig, providers: Providers, *, seed: int) -> SearchParts:
    """Open the parts and read the templates. Makes no request."""
    if config.rookery.tune is not None:
        await asyncio.to_thread(load_library)  # fails early with the package to install
    language = providers.language
    store = ProgramStore(providers.run.blobs)
    endpoints = _endpoints(config, providers)
    prompts: Prompts | Reflection
    evaluator: ProgramEvaluator | PromptEvaluator
    if providers.answers is not None:
        prompts = await asyncio.to_thread(Reflection, config, providers.answers, seed=seed)
        evaluator = PromptEvaluator(config, providers.answers, store=store, seed=seed)
    else:
        if providers.executor is None:
            raise ConfigError("An evolution of programs needs an executor to score them.")
        prompts = await asyncio.to_thread(Prompts, config, language=language, seed=seed)
        evaluator = ProgramEvaluator(
            config,
            executor=providers.executor,
            store=store,
            judges=_open_judges(config, endpoints, prompts, seed),
            seed=seed,
            job_offset=providers.job_offset,
        )
    return SearchParts(
        config=config,
        run=providers.run,
        store=store,
        proposer=Proposer(
            store=store,
            prompts=prompts,
            rules=config.answer_rules(language),
            arms=endpoints,
            seed=seed,
            with_prompts=config.database.log_prompts,
        ),
        evaluator=evaluator,
        observer=providers.observer,
        novelty=_open_novelty(config, providers, endpoints, store, seed),
    )


def _endpoints(config: EvolveConfig, providers: Providers) -> dict[str, Endpoint]:
    return {
        name: _endpoint(name, model, config, providers)
        for name, model in providers.engine.models.items()
    }


def _endpoint(
    name: str, model: TextModel, config: EvolveConfig, providers: Providers, *, like: str = ""
) -> Endpoint:
    """Build the endpoint of a model. `like` names a model whose settings it takes."""
    named = {model.name: model for model in (*config.llm.judges, *config.llm.ensemble)}
    settings = named.get(like or name) or config.llm.complete(ModelConfig())
    return Endpoint(
        model,
        settings.model_copy(update={"name": name}),
        down_s=config.rookery.model_down_s,
        on_waiting=providers.observer.on_phase,
    )


async def open_learning(
    parts: SearchParts, providers: Providers, state: SearchState, *, seed: int
) -> Learning | None:
    """Open the trainings of the evolution, if its config has `rookery.learn`."""
    config = parts.config
    if config.rookery.learn is None:
        return None
    if providers.engine.learner is None:
        raise ConfigError("The config has rookery.learn, and no trainer was given.")
    if taken := [name for name in providers.engine.models if name.startswith(ADAPTER_NAME)]:
        raise ConfigError(
            f"A model is named {taken[0]!r}, and rookery.learn gives names that begin with "
            f"{ADAPTER_NAME}: name it otherwise."
        )
    base = config.rookery.engine_models[0]

    def add_arm(name: str, model: TextModel) -> None:
        parts.proposer.add_arm(name, _endpoint(name, model, config, providers, like=base))

    return await asyncio.to_thread(
        Learning,
        config.rookery.learn,
        providers.engine.learner,
        run=parts.run,
        store=parts.store,
        state=state,
        add_arm=add_arm,
        say=providers.observer.on_phase,
        seed=seed,
    )


def _open_novelty(
    config: EvolveConfig,
    providers: Providers,
    endpoints: Mapping[str, Endpoint],
    store: ProgramStore,
    seed: int,
) -> Novelty | None:
    database = config.database
    if not database.is_compared:
        return None
    if providers.engine.embedder is None:
        raise ConfigError(
            f"The config names the embedding model {database.embedding_model!r}, and it was not "
            "opened."
        )
    if database.novelty_llm is False:
        return Novelty(providers.engine.embedder, store=store, judge=None)
    arms = list_arms(config, providers.engine.models)
    if database.novelty_llm is not None:
        arms = tuple(Arm(name=arm.name) for arm in arms if arm.name == database.novelty_llm)
        if not arms:
            raise ConfigError(
                f"database.novelty_llm is {database.novelty_llm!r}, which is no model of llm: name "
                "one of them, or write false to reject similar programs without a judge."
            )
    judge = NoveltyJudge(arms, endpoints=endpoints, seed=seed)
    return Novelty(providers.engine.embedder, store=store, judge=judge)


def _open_judges(
    config: EvolveConfig, endpoints: Mapping[str, Endpoint], prompts: Prompts, seed: int
) -> Judges | None:
    if not config.evaluator.use_llm_feedback:
        return None
    models = config.llm.judges or tuple(ModelConfig(name=name) for name in endpoints)
    for model in models:
        if model.name not in endpoints:
            raise ConfigError(f"The config names the judge {model.name!r}, and it was not opened.")
    judges = tuple(
        Judge(endpoint=endpoints[str(model.name)], weight=model.weight) for model in models
    )
    weight = config.evaluator.llm_feedback_weight
    return Judges(judges, prompts=prompts, weight=weight, seed=seed)


# First programs. Each is an event, so that a resumed run does not score it again. If one fails, no
# model is asked: it is the user's mistake, and no child could be compared with it.


FIRST_PROGRAM = "first_program"
"""Event kind of a first program. The key is its number."""


def first_id(number: int) -> str:
    """Return the id of a first program. Numbers count from 1."""
    return f"first{number}"


def leave_out_failed(
    programs: Sequence[FirstProgram | ProgramRecord], *, features: Collection[str]
) -> list[FirstProgram | ProgramRecord]:
    """Drop a checkpoint's programs without a score, or with only OpenEvolve's marks of a failed
    evaluation. OpenEvolve keeps those as programs of score 0."""
    return [
        program
        for program in programs
        if isinstance(program, FirstProgram) or not _has_failed(program, features)
    ]


def _has_failed(program: ProgramRecord, features: Collection[str]) -> bool:
    metrics = numeric_metrics(program.metrics)
    is_marked = metrics.get("error") == 0.0 and COMBINED not in metrics
    return is_marked or score_of(metrics, features=features) is None


async def prepare_first_programs(
    programs: Sequence[FirstProgram | ProgramRecord], *, parts: SearchParts, state: SearchState
) -> list[Evaluated]:
    """Return the measurements of each program, reusing those of earlier processes."""
    credits = asyncio.Semaphore(parts.config.workers)
    return await together(
        _prepare(number, program, parts, state, credits)
        for number, program in enumerate(programs, start=1)
    )


def tell_first_programs(
    measured: Sequence[Evaluated],
    programs: Sequence[FirstProgram | ProgramRecord],
    *,
    parts: SearchParts,
    state: SearchState,
) -> None:
    """Tell the programs in order, each on its own or its earlier island. If one could run only in
    the evaluator's process, later programs run there too."""
    if any(evaluated.is_forgeable for evaluated in measured):
        parts.evaluator.isolate = False
    num_islands = parts.config.database.num_islands
    for number, (evaluated, program) in enumerate(zip(measured, programs, strict=True), start=1):
        parts.store.add(first_id(number), evaluated.program)
        earlier = program.island if isinstance(program, ProgramRecord) else None
        island = number - 1 if earlier is None else earlier
        state.tell_first(first_id(number), evaluated, island=island % num_islands)


async def _prepare(
    number: int,
    program: FirstProgram | ProgramRecord,
    parts: SearchParts,
    state: SearchState,
    credits: asyncio.Semaphore,
) -> Evaluated:
    known = parts.run.get(FIRST_PROGRAM, str(number))
    if known is not None:
        return from_data(Evaluated, known.payload)
    comparison = await parts.novelty.embed(program.code) if parts.novelty else UNCOMPARED
    async with credits:
        if isinstance(program, ProgramRecord):
            evaluated = await run_in_thread(_accept, number, program, comparison, parts)
        else:
            evaluated = await _score(number, program, comparison, parts)
    evaluated = comparison.note_in(evaluated)
    problem = evaluated.failure.message if evaluated.failure else None
    problem = problem or state.database.problem_with(evaluated.metrics)
    if problem is not None:
        kind = f" ({evaluated.failure.kind})" if evaluated.failure else ""
        which = f"The first program {number}" if number > 1 else "The first program"
        raise ConfigError(
            f"{which} gets no score{kind}: {problem.rstrip('.')}. An evolution starts from a "
            "program that the evaluator can score: mend the program or the evaluator."
        )
    event = await parts.run.append(FIRST_PROGRAM, to_data(evaluated), key=str(number))
    return from_data(Evaluated, event.payload)


async def _score(
    number: int, program: FirstProgram, comparison: Comparison, parts: SearchParts
) -> Evaluated:
    record = ProgramRecord(
        id=first_id(number),
        code=program.code,
        language=program.language,
        island=(number - 1) % parts.config.database.num_islands,
        changes_description=parts.config.prompt.initial_changes_description,
    )
    child = await run_in_thread(make_child, record)
    # Attempts count from 1, so jobs of first programs have numbers below.
    lease = Lease(1 - number, _note_nothing)
    child = comparison.note_on(child)
    return await parts.evaluator.evaluate(child, lease=lease, best_score=None)


async def _note_nothing(_: Lease) -> None:
    """Do nothing: an unfinished first program is scored again on resume."""


def _accept(
    number: int, program: ProgramRecord, comparison: Comparison, parts: SearchParts
) -> Evaluated:
    """Accept a program with its recorded metrics."""
    record = replace(program, id=first_id(number), parent_id=None, iteration=0, prompts={})
    child = comparison.note_on(make_child(replace(record, embedding=None)))
    return Evaluated(
        program=parts.store.put(child.program),
        metrics=numeric_metrics(record.metrics),
        code=child.summary,
        code_hash=child.code_hash,
        has_large_artifacts=has_large(
            record.artifacts, max_bytes=parts.config.database.artifact_size_threshold
        ),
    )
