"""A model on a Megatron server for the service: it trains, and samples unless vLLM does."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rookery.compose.backends import (
    FolderAdapters,
    TemplateCodec,
    lora_config,
    merge_into,
    tokenizer_of,
)
from rookery.compose.sft import base_name
from rookery.embedded import EngineConfig, resolve_model
from rookery.engines import AnyEngineConfig, open_engine
from rookery.errors import ConfigError
from rookery.megatron import (
    LoraStart,
    MegatronEngine,
    MegatronServer,
    MegatronTrainer,
    open_megatron,
)
from rookery.model_names import is_named
from rookery.ports import Engine
from rookery.service.backend import Backend
from rookery.tasks.template import load_template
from rookery.train.losses import make_loss
from rookery.types import Json, LoraShape
from rookery.weights import read_adapter, write_adapter

__all__ = ["open_megatron_backend"]


@asynccontextmanager
async def open_megatron_backend(
    model: str, *, url: str, engine: AnyEngineConfig, alpha: float
) -> AsyncIterator[Backend]:
    """The server must run this model; its tokenizer is read here."""
    folder = await asyncio.to_thread(resolve_model, model)
    template = await asyncio.to_thread(load_template, folder.path, chat=False)
    async with AsyncExitStack() as stack:
        key = os.environ.get("MEGATRON_SERVER_KEY", "")
        server = await stack.enter_async_context(open_megatron(url, key=key))
        _check_model(server, folder.name)
        opened: Engine = MegatronEngine(server)
        if not isinstance(engine, EngineConfig):
            opened = await stack.enter_async_context(open_engine(engine))
        trainer = MegatronTrainer(server)
        yield Backend(
            engine=opened,
            trainer=trainer,
            trainees=MegatronTrainees(trainer, server, base=base_name(folder.name), alpha=alpha),
            folders=FolderAdapters(opened),
            codec=TemplateCodec(template),
            tokenizer=tokenizer_of(model, folder),
            merge=partial(merge_into, folder.path),
        )


def _check_model(server: MegatronServer, model: str) -> None:
    if not is_named(model, frozenset(server.info.names)):
        raise ConfigError(
            f"The Megatron server at {server.url} runs {server.info.base}, and models names "
            f"{model}: start it with --model {model}, or map the names to its model."
        )


class MegatronTrainees:
    """The trainees of a Megatron server, for callers without tensors."""

    def __init__(
        self, trainer: MegatronTrainer, server: MegatronServer, *, base: str, alpha: float
    ) -> None:
        self._trainer = trainer
        self._linears = server.info.linear_layers
        self._base = base
        self._alpha = alpha

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        if isinstance(start, Path):
            adapter = await asyncio.to_thread(read_adapter, start, name=trainee)
            await self._trainer.create(trainee, replace(adapter, base=self._base))
            return
        lora = lora_config(start, self._linears, alpha=self._alpha)
        await self._trainer.create(trainee, LoraStart(lora=lora, base=self._base, seed=start.seed))

    async def remove(self, trainee: str) -> None:
        await self._trainer.remove(trainee)

    async def export(self, trainee: str, folder: Path) -> None:
        adapter = await self._trainer.adapter(trainee)
        await asyncio.to_thread(write_adapter, adapter, folder)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        await asyncio.to_thread(make_loss, loss, options)
