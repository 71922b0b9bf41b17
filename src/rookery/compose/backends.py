"""Models for the service: an engine and a trainer over one copy of the weights, as a Backend."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rookery.compose.sft import base_name
from rookery.embedded import EngineConfig, resolve_model, run_engine
from rookery.embedded.folders import ModelFolder
from rookery.engines import AnyEngineConfig, open_engine
from rookery.ports import Adapters, Engine
from rookery.service.backend import Backend
from rookery.slots import SlottedModel, find_device, load_model
from rookery.tasks.template import Template, load_template
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.losses import make_loss
from rookery.types import Json, LoraShape, Message, ModelRef, Task, TokenIds
from rookery.weights import read_adapter
from rookery.weights.merged_model import write_merged

__all__ = [
    "FolderAdapters",
    "TemplateCodec",
    "lora_config",
    "merge_into",
    "open_backend",
    "tokenizer_of",
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)


@asynccontextmanager
async def open_backend(
    model: str, *, engine: AnyEngineConfig, trainer: TrainerConfig, alpha: float
) -> AsyncIterator[Backend]:
    """The engine and the trainer of one model, open for the block."""
    folder = await asyncio.to_thread(resolve_model, model)
    template = await asyncio.to_thread(load_template, folder.path, chat=False)
    weights = await _load(folder, engine)
    async with _open_engine(weights, folder, engine, template) as opened:
        lora = LoraTrainer(weights, config=trainer)
        yield Backend(
            engine=opened,
            trainer=lora,
            trainees=LoraTrainees(lora, weights, base=base_name(folder.name), alpha=alpha),
            folders=FolderAdapters(opened),
            codec=TemplateCodec(template),
            tokenizer=tokenizer_of(model, folder),
            merge=partial(merge_into, folder.path),
        )


class LoraTrainees:
    """The trainees of a LoraTrainer, for callers without tensors."""

    def __init__(
        self, trainer: LoraTrainer, model: SlottedModel, *, base: str, alpha: float
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._base = base
        self._alpha = alpha

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        await asyncio.to_thread(self._create, trainee, start)

    async def remove(self, trainee: str) -> None:
        if trainee in self._trainer.trainees:
            self._trainer.remove(trainee)

    async def export(self, trainee: str, folder: Path) -> None:
        await self._trainer.export(trainee, folder)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        await asyncio.to_thread(make_loss, loss, options)

    def _create(self, trainee: str, start: LoraShape | Path) -> None:
        if isinstance(start, Path):
            adapter = read_adapter(start, name=trainee)
        else:
            adapter = initial_adapter(
                self._model,
                lora_config(start, self._model.linears, alpha=self._alpha),
                name=trainee,
                base=self._base,
                seed=start.seed,
            )
        if trainee in self._trainer.trainees:
            self._trainer.remove(trainee)
        self._trainer.add(trainee, replace(adapter, base=self._base))


def lora_config(shape: LoraShape, linears: Iterable[str], *, alpha: float) -> LoraConfig:
    """Of the layers that the client chose, those that the model has."""
    chosen = {ATTENTION: shape.train_attn, MLP: shape.train_mlp, UNEMBED: shape.train_unembed}
    ends = {name.rpartition(".")[2] for name in linears}
    names = [name for group, is_chosen in chosen.items() if is_chosen for name in group]
    targets = tuple(name for name in names if name in ends)
    return LoraConfig(rank=shape.rank, alpha=alpha, targets=targets)


class FolderAdapters:
    """PEFT folders into an engine."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        adapter = await asyncio.to_thread(read_adapter, folder, name=name)
        return await self._adapters.load(adapter)

    async def unload(self, ref: ModelRef) -> None:
        await self._adapters.unload(ref)


class TemplateCodec:
    """Text and chats by a model's own tokenizer and chat template."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def encode(self, text: str) -> TokenIds:
        return self._template.encode(Task(id="prompt", prompt=text, reference=None))

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        return self._template.encode_chat(messages, tools=tools)

    def decode(self, tokens: TokenIds) -> str:
        return self._template.decode(tokens)


async def _load(folder: ModelFolder, config: AnyEngineConfig) -> SlottedModel:
    """The weights that are trained on, and drawn from where the engine is in this process."""
    dtype, device = "auto", "auto"
    if isinstance(config, EngineConfig):
        dtype, device = config.dtype, config.device
    return await asyncio.to_thread(
        load_model, folder.path, device=find_device(device), dtype=dtype, names=folder.names
    )


@asynccontextmanager
async def _open_engine(
    weights: SlottedModel, folder: ModelFolder, config: AnyEngineConfig, template: Template
) -> AsyncIterator[Engine]:
    if not isinstance(config, EngineConfig):
        async with open_engine(config) as fleet:
            yield fleet
        return
    async with run_engine(
        weights,
        config=config,
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name=folder.name,
    ) as shared:
        yield shared


def merge_into(model: Path, adapter: Path, target: Path) -> None:
    """A model folder with a PEFT folder merged into it."""
    write_merged(model, read_adapter(adapter), target)


def tokenizer_of(model: str, folder: ModelFolder) -> str:
    """A model's id where it has one; else its folder, for clients on this machine."""
    is_id = "/" in model and not Path(model).expanduser().exists()
    return model if is_id else str(folder.path.resolve())
