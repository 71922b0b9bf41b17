"""Opens the embedded engine and keeps it running inside an `async with` block."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from transformers import AutoTokenizer

from rookery.embedded.engine import EmbeddedEngine, EngineConfig
from rookery.embedded.folders import resolve_model
from rookery.errors import ModelError, boundary
from rookery.slots import SlottedModel, find_device, load_model
from rookery.slots.linear import can_pack

__all__ = ["driven", "open_engine", "run_engine"]

Answer = TypeVar("Answer")
Params = ParamSpec("Params")


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and keep the engine running inside the block."""
    device = find_device(config.device)
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        folder = await _run_in(thread, resolve_model, config.model)
        model = await _run_in(
            thread, load_model, folder.path, device=device, dtype=config.dtype, names=folder.names
        )
        if can_pack(device=model.device, dtype=model.dtype):
            await _run_in(thread, model.pack)
        with boundary(ModelError, f"The tokenizer of {config.model} cannot be loaded"):
            tokenizer = await _run_in(thread, AutoTokenizer.from_pretrained, folder.path)

        def detokenize(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
            return text

        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=folder.name, thread=thread
        )
        async with driven(engine):
            yield engine


@asynccontextmanager
async def run_engine(
    model: SlottedModel,
    *,
    config: EngineConfig,
    detokenize: Callable[[Sequence[int]], str],
    name: str,
) -> AsyncIterator[EmbeddedEngine]:
    """Keep an engine over a model that is loaded already running inside the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=name, thread=thread
        )
        async with driven(engine):
            yield engine


@asynccontextmanager
async def driven(engine: EmbeddedEngine) -> AsyncIterator[None]:
    driver = asyncio.create_task(engine.drive(), name="rookery-engine")
    try:
        yield
    finally:
        engine.close()
        await driver  # the step in progress runs to its end


async def _run_in(
    thread: Executor,
    function: Callable[Params, Answer],
    *args: Params.args,
    **kwargs: Params.kwargs,
) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(
        thread, partial(function, *args, **kwargs)
    )
