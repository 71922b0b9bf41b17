"""Models of our own engine for an evolution: base, adapters, and those of `rookery.learn`."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import Field

from rookery.compose.elsewhere import end_token, sft_elsewhere
from rookery.compose.running import open_shown_engine, quiet_libraries
from rookery.config import Config, parse_config
from rookery.embedded.folders import ModelFolder
from rookery.engines import (
    AnyEngineConfig,
    EngineChoice,
    base_name,
    find_model,
    require_adapters,
    trainer_place,
)
from rookery.errors import ConfigError, RookeryError, TaskError
from rookery.loops.evolve.config import LearnConfig, RookeryConfig
from rookery.loops.evolve.learning import Lesson, Trained
from rookery.loops.evolve.parts import Models
from rookery.loops.evolve.prompt_tasks import Answerer
from rookery.ports import Engine, TextModel
from rookery.rollout.asking import EngineTextModel
from rookery.slots import load_model
from rookery.slots.loading import require_decoder
from rookery.tasks.template import Template, load_template
from rookery.train.lora_trainee import LoraConfig
from rookery.train.packing import input_tokens
from rookery.train.sft import SftConfig, SftStep, sft, sft_data
from rookery.train.slotted_trainer import TrainerConfig
from rookery.types import Adapter, Datum, Message, ModelRef, Task, TextReply, TextRequest
from rookery.ui.display import Display
from rookery.weights import read_adapter, write_adapter
from rookery.weights.stack import LayerShape, Layout, zero_adapter

__all__ = ["OwnEngine", "open_engine_models", "read_engine"]

OnStep = Callable[[SftStep], None]
PASS_TOKENS = 2048
"""Maximum tokens in one training pass. Small, because the servers hold most of the GPU memory."""


class _Section(Config):
    """Keys of `rookery` that describe the engine."""

    engine: EngineChoice
    adapters: dict[str, Path] = Field(default_factory=dict)
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngine:
    """Everything the section `rookery` names for the engine, read before the engine is opened."""

    config: AnyEngineConfig
    adapters: dict[str, Adapter]
    folder: ModelFolder
    template: Template
    answerer: str | None
    """The model that answers tasks: `base` or an adapter. None: there are no tasks."""
    learn: LearnConfig | None


def read_engine(config: RookeryConfig) -> OwnEngine:
    """Read the engine's inputs. Finds every error that does not need the open engine."""
    quiet_libraries()
    document = config.model_dump(mode="json", include={"engine", "adapters", "tokenizer"})
    section = parse_config(_Section, document, origin="the section rookery")
    adapters = {name: read_adapter(path) for name, path in section.adapters.items()}
    ranks = {f"The rank of {name}": adapter.rank for name, adapter in adapters.items()}
    folder = find_model(section.engine, tokenizer=section.tokenizer)
    if config.learn is not None:
        ranks["rookery.learn.rank"] = config.learn.rank
        require_decoder(folder.path)
    require_adapters(section.engine, ranks)
    return OwnEngine(
        config=section.engine,
        adapters=adapters,
        folder=folder,
        template=load_template(folder.path),
        answerer=None if config.tasks is None else config.tasks.model,
        learn=config.learn,
    )


@asynccontextmanager
async def open_engine_models(
    engine_inputs: OwnEngine, names: Collection[str], display: Display
) -> AsyncIterator[Models]:
    """Open the engine and load all adapters. The yielded models are `names` (`base` or adapters) as
    proposers, the model that answers tasks, and the trainer of further adapters. Errors of the
    engine are raised before the first request."""
    async with open_shown_engine(engine_inputs.config, display) as engine:
        refs = {"base": engine.base}
        for name, adapter in engine_inputs.adapters.items():
            refs[name] = await engine.load(adapter)
        ask = partial(EngineTextModel, engine, template=engine_inputs.template)
        models: dict[str, TextModel] = {name: ask(model=refs[name]) for name in names}
        learner = None
        if engine_inputs.learn is not None:
            await _require_loading(engine, engine_inputs.learn)
            learner = _EngineLearner(engine, engine_inputs, engine_inputs.learn)
        answerer = None
        if engine_inputs.answerer is not None:
            ref = refs[engine_inputs.answerer]
            answerer = Answerer(sampler=engine, model=ref, template=engine_inputs.template)
        yield Models(models=models, learner=learner, answerer=answerer)


async def _require_loading(engine: Engine, config: LearnConfig) -> None:
    """Load and unload a zero adapter of the shape that training makes."""
    try:
        layers = tuple(
            LayerShape(name, *size)
            for name, size in sorted(engine.linear_layers.items())
            if name.endswith(LoraConfig().targets)
        )
        base = base_name(engine.base.version)
        layout = Layout(base=base, layers=layers, rank=config.rank)
        ref = await engine.load(zero_adapter(layout, name="learned", seed=(0,)))
        await engine.unload(ref)
    except RookeryError as error:
        raise ConfigError(
            f"rookery.learn needs an engine that takes adapters while it runs. {error} Or leave "
            "learn out."
        ) from error


def _free_memory() -> None:
    """Return the GPU memory of a deleted model: torch caches it otherwise."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _EngineLearner:
    """Trains on the service if that is the engine, else on a copy of the engine's model. The copy
    is in memory only during training."""

    def __init__(self, engine: Engine, engine_inputs: OwnEngine, config: LearnConfig) -> None:
        self._engine = engine
        self._config = config
        self._service = engine_inputs.config if engine_inputs.config.type == "service" else None
        self._place = trainer_place(engine_inputs.config)
        """Device and dtype of the copy."""
        self._folder = engine_inputs.folder
        self._template = engine_inputs.template
        self._opened: dict[str, _LearnedModel] = {}

    async def train(self, lessons: Sequence[Lesson], *, name: str, seed: int) -> Trained:
        began = time.perf_counter()
        learn, steps = self._config, list[SftStep]()
        config = SftConfig(
            rank=learn.rank,
            alpha=2.0 * learn.rank,
            epochs=learn.epochs,
            batch_size=learn.batch_size,
            learning_rate=learn.learning_rate,
            seed=seed,
            trainer=TrainerConfig(pass_tokens=PASS_TOKENS, checkpoint_layers=True),
        )
        adapter, data = await self._train(lessons, config, name=name, on_step=steps.append)
        return Trained(
            write=partial(write_adapter, adapter),
            num_rows=len(data),
            num_tokens=learn.epochs * sum(len(input_tokens(one)) for one in data),
            num_answer_tokens=learn.epochs * sum(len(one.targets) for one in data),
            seconds=time.perf_counter() - began,
            loss=steps[-1].loss,
        )

    async def _train(
        self, lessons: Sequence[Lesson], config: SftConfig, *, name: str, on_step: OnStep
    ) -> tuple[Adapter, list[Datum]]:
        folder, (device, dtype) = self._folder, self._place
        train: Callable[..., Awaitable[Adapter]]
        most = self._engine.context_tokens
        if self._service is None:
            model = await asyncio.to_thread(
                load_model, folder.path, device=device, dtype=dtype, names=folder.names
            )
            shape = model.shape
            token, most = next(iter(shape.eos_tokens), None), shape.context_tokens
            train = partial(sft, model)
            del model
        else:
            token = await asyncio.to_thread(end_token, folder.path)
            train = partial(sft_elsewhere, self._service)
        data = await asyncio.to_thread(self._data, lessons, end_token=token)
        data = [one for one in data if most is None or len(input_tokens(one)) <= most]
        base = base_name(self._engine.base.version)
        adapter = await train(data, config, name=name, base=base, on_step=on_step)
        del train
        await asyncio.to_thread(_free_memory)
        return adapter, data

    def _data(self, lessons: Sequence[Lesson], *, end_token: int | None) -> list[Datum]:
        """Return training rows, without answers that the tokenizer cannot encode."""
        data = []
        for lesson in lessons:
            prompt = (
                Message(role="system", content=lesson.system),
                Message(role="user", content=lesson.user),
            )
            task = Task(id=lesson.answer[:40], prompt=prompt, reference=lesson.answer)
            with suppress(TaskError):
                [row] = sft_data([task], self._template, end_token=end_token)
                data.append(replace(row, weights=(lesson.weight,) * len(row.weights)))
        return data

    def open(self, folder: Path, *, name: str) -> TextModel:
        self._opened[name] = _LearnedModel(self._engine, folder, template=self._template)
        return self._opened[name]

    async def retire(self, name: str) -> None:
        await self._opened[name].unload()


class _LearnedModel:
    """An adapter folder as a text model. The adapter is loaded at its first request."""

    def __init__(self, engine: Engine, folder: Path, *, template: Template) -> None:
        self._engine = engine
        self._folder = folder
        self._template = template
        self._loading = asyncio.Lock()
        self._ref: ModelRef | None = None

    async def reply(self, request: TextRequest) -> TextReply:
        ref = await self._load()
        return await EngineTextModel(self._engine, model=ref, template=self._template).reply(
            request
        )

    async def _load(self) -> ModelRef:
        async with self._loading:
            if self._ref is None:
                adapter: Adapter = await asyncio.to_thread(read_adapter, self._folder)
                self._ref = await self._engine.load(adapter)
            return self._ref

    async def unload(self) -> None:
        async with self._loading:
            ref, self._ref = self._ref, None
        if ref is not None:
            await self._engine.unload(ref)
