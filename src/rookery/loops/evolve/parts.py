"""What the searches of a run are made of: the models, the evaluator, the programs on disk."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, ModelConfig
from rookery.loops.evolve.learning import Learner, Learning
from rookery.loops.evolve.novelty import Novelty, NoveltyJudge
from rookery.loops.evolve.program import ProgramStore
from rookery.loops.evolve.program_evaluator import Judge, Judges, ProgramEvaluator
from rookery.loops.evolve.prompts import Prompts
from rookery.loops.evolve.proposer import Endpoint, Proposer
from rookery.loops.evolve.search_state import SearchState
from rookery.ports import Embedder, Executor, TextModel
from rookery.runs import Run
from rookery.search.es import load_library
from rookery.search.programs.bandit import Arm

__all__ = [
    "UNWATCHED",
    "Iteration",
    "Parts",
    "Providers",
    "Watcher",
    "list_arms",
    "open_learning",
    "open_parts",
]

# Who is told while an evolution runs: the terminal, a page, a test.


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration that was decided: it gave a program, or a failure with its reason."""

    series: str = ""
    """The baseline that it belongs to; empty for the evolution."""
    number: int
    num_decided: int
    """With this one."""
    num_iterations: int
    """All that the run will do unless it ends early."""
    model: str
    program: str = ""
    """The id of the program; empty for a failure."""
    score: float | None = None
    best_score: float
    is_best: bool = False
    failure: str = ""
    """The kind of failure; empty for a program."""
    message: str = ""
    """The sentence of a failure."""
    tokens: int | None = None
    """Of prompt and answer; None when the model does not report them."""
    evaluation_s: float | None = None


class Watcher(Protocol):
    """Told in the event loop: must return at once."""

    def on_iteration(self, iteration: Iteration) -> None: ...

    def on_waiting(self, sentence: str) -> None:
        """The run waits for something outside of it, such as a model that is down."""
        ...


class _Unwatched:
    def on_iteration(self, iteration: Iteration) -> None:
        pass

    def on_waiting(self, sentence: str) -> None:
        pass


UNWATCHED: Watcher = _Unwatched()


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """What the caller of the loop provides."""

    models: Mapping[str, TextModel]
    executor: Executor
    run: Run
    watcher: Watcher
    language: str
    embedder: Embedder | None = None
    """Where the config names an embedding model."""
    learner: Learner | None = None
    """Where the config has `rookery.learn`."""
    job_offset: int = 0
    """Added to the attempts of jobs: searches at the same time share the executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one search uses. Programs are found by id in `store`, which is its own."""

    config: EvolveConfig
    run: Run
    store: ProgramStore
    proposer: Proposer
    evaluator: ProgramEvaluator
    watcher: Watcher
    novelty: Novelty | None = None
    """None: programs are not compared by embedding."""


def list_arms(config: EvolveConfig, models: Mapping[str, TextModel]) -> tuple[Arm, ...]:
    """The models that propose programs, with their weights."""
    weights = {model.name: model.weight for model in config.llm.ensemble}
    judges = {model.name for model in config.llm.judges}
    names = [name for name in models if name in weights or name not in judges]
    if missing := [name for name in weights if name not in models]:
        raise ConfigError(f"The config names the model {missing[0]!r}, and it was not opened.")
    if not any(weights.get(name, 1.0) > 0 for name in names):
        raise ConfigError("An evolution needs a model with a weight above 0 to ask.")
    return tuple(Arm(name=name, weight=weights.get(name, 1.0)) for name in names)


async def open_parts(config: EvolveConfig, providers: Providers, *, seed: int) -> Parts:
    """Reads the templates; nobody is asked yet."""
    if config.rookery.tune is not None:
        await asyncio.to_thread(load_library)  # says what to install
    language = providers.language
    store = ProgramStore(providers.run.blobs)
    prompts = await asyncio.to_thread(Prompts, config, language=language, seed=seed)
    endpoints = _endpoints(config, providers)
    judges = _open_judges(config, endpoints, prompts, seed)
    return Parts(
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
        evaluator=ProgramEvaluator(
            config,
            executor=providers.executor,
            store=store,
            judges=judges,
            seed=seed,
            job_offset=providers.job_offset,
        ),
        watcher=providers.watcher,
        novelty=_open_novelty(config, providers, endpoints, store, seed),
    )


def _endpoints(config: EvolveConfig, providers: Providers) -> dict[str, Endpoint]:
    return {
        name: _endpoint(name, model, config, providers) for name, model in providers.models.items()
    }


def _endpoint(
    name: str, model: TextModel, config: EvolveConfig, providers: Providers, *, like: str = ""
) -> Endpoint:
    """`like` is a model whose settings it has."""
    named = {model.name: model for model in (*config.llm.judges, *config.llm.ensemble)}
    own = named.get(like or name) or config.llm.complete(ModelConfig())
    return Endpoint(
        model,
        own.model_copy(update={"name": name}),
        down_s=config.rookery.model_down_s,
        on_waiting=providers.watcher.on_waiting,
    )


async def open_learning(
    parts: Parts, providers: Providers, state: SearchState, *, seed: int
) -> Learning | None:
    """The trainings of the evolution, if its config has `rookery.learn`."""
    config = parts.config
    if config.rookery.learn is None:
        return None
    if providers.learner is None:
        raise ConfigError("The config has rookery.learn, and nobody was given who trains.")
    base = config.rookery.engine_models[0]

    def add_arm(name: str, model: TextModel) -> None:
        parts.proposer.add_arm(name, _endpoint(name, model, config, providers, like=base))

    return await asyncio.to_thread(
        Learning,
        config.rookery.learn,
        providers.learner,
        run=parts.run,
        store=parts.store,
        state=state,
        add_arm=add_arm,
        say=providers.watcher.on_waiting,
        seed=seed,
    )


def _open_novelty(
    config: EvolveConfig,
    providers: Providers,
    endpoints: Mapping[str, Endpoint],
    store: ProgramStore,
    seed: int,
) -> Novelty | None:
    own = config.database
    if not own.is_compared:
        return None
    if providers.embedder is None:
        raise ConfigError(
            f"The config names the embedding model {own.embedding_model!r}, and it was not opened."
        )
    if own.novelty_llm is False:
        return Novelty(providers.embedder, store=store, judge=None)
    arms = list_arms(config, providers.models)
    if own.novelty_llm is not None:
        arms = tuple(Arm(name=arm.name) for arm in arms if arm.name == own.novelty_llm)
        if not arms:
            raise ConfigError(
                f"database.novelty_llm is {own.novelty_llm!r}, which is no model of llm: name one "
                "of them, or write false to reject what is similar unasked."
            )
    judge = NoveltyJudge(arms, endpoints=endpoints, seed=seed)
    return Novelty(providers.embedder, store=store, judge=judge)


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
