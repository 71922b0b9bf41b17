"""Supervised training on a service elsewhere (`engine: {type: service, url: ...}`)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import transformers

from rookery.errors import ModelError, TrainError, boundary
from rookery.remote import ServiceClientConfig, open_client, read_states
from rookery.slots.loading import require_decoder
from rookery.train import new_adapter
from rookery.train.packing import input_tokens
from rookery.train.sft import SftConfig, SftStep, SftTraining, prepare_sft_elsewhere
from rookery.types import Adapter, Datum

__all__ = ["Forget", "end_token", "forget_states", "open_training", "sft_elsewhere"]

Forget = Callable[[Path], Awaitable[None]]
"""Deletes the training states on the service that the files in a folder name."""


def end_token(folder: Path) -> int | None:
    """Return the token that ends an answer, from the config files. Reads no weights."""
    config = require_decoder(folder)
    with boundary(ModelError, f"The generation config in {folder} cannot be read"):
        is_there = (folder / "generation_config.json").is_file()
        settings = transformers.GenerationConfig.from_pretrained(folder) if is_there else None
    eos = None if settings is None else settings.eos_token_id
    if eos is None:
        eos = config.get_text_config().eos_token_id
    if isinstance(eos, list | tuple):
        eos = eos[0] if eos else None
    return None if eos is None else int(eos)


@asynccontextmanager
async def open_training(
    service: ServiceClientConfig,
    data: Sequence[Datum],
    config: SftConfig,
    *,
    name: str,
    base: str,
    init: Adapter | None,
) -> AsyncIterator[tuple[SftTraining, Forget]]:
    """Open a training on the service. It starts like a local one, and refuses too long rows."""
    async with open_client(service, has_last_states=True) as client:
        engine, trainer = client.engine, client.trainer
        longest = max((len(input_tokens(datum)) for datum in data), default=0)
        if engine.context_tokens is not None and longest > engine.context_tokens:
            raise TrainError(
                f"The longest row has {longest} tokens, and the model of the service takes "
                f"{engine.context_tokens}: shorten it."
            )
        start = init or new_adapter(
            engine.linear_layers, config, name=name, base=base, seed=config.seed
        )
        start = replace(start, name=name, base=start.base or base)
        training = await prepare_sft_elsewhere(trainer, data, config, start=start)

        async def forget(folder: Path) -> None:
            await trainer.forget(await asyncio.to_thread(states_in, folder))

        yield training, forget


async def sft_elsewhere(
    service: ServiceClientConfig,
    data: Sequence[Datum],
    config: SftConfig,
    *,
    name: str,
    base: str,
    init: Adapter | None = None,
    checkpoints: Path | None = None,
    on_step: Callable[[SftStep], None] | None = None,
) -> Adapter:
    """Run `rookery.train.sft.sft` on a service. States in `checkpoints` stay there for a resume."""
    async with open_training(service, data, config, name=name, base=base, init=init) as (
        training,
        _,
    ):
        return await training.run(checkpoints=checkpoints, on_step=on_step)


async def forget_states(service: ServiceClientConfig, folder: Path) -> None:
    """Delete the states on the service that the folder's checkpoints name."""
    if states := await asyncio.to_thread(states_in, folder):
        async with open_client(service) as client:
            await client.trainer.forget(states)


def states_in(folder: Path) -> list[str]:
    return [state for path in sorted(folder.glob("*.safetensors")) for state in read_states(path)]
