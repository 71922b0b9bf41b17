"""The server's application over the tiny model, without megatron-core, in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn

from rookery.embedded import EngineConfig, run_engine
from rookery.megatron.server import Hosted, make_app
from rookery.model_names import model_names
from rookery.slots import load_model
from rookery.train import LoraTrainer, TrainerConfig

__all__ = ["served"]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(
    folder: Path, *, key: str = "", port: int = 0
) -> AsyncIterator[tuple[str, Hosted]]:
    """Its address, and what is behind it; not reachable any more after the block."""
    model = await asyncio.to_thread(load_model, folder)
    config = EngineConfig(model=str(folder))
    detokenize = lambda tokens: " ".join(f"w{token}" for token in tokens)  # noqa: E731
    with socket.create_server(("127.0.0.1", port)) as listener:
        async with run_engine(model, config=config, detokenize=detokenize, name=str(folder)) as own:
            hosted = Hosted(
                model=model,
                trainer=LoraTrainer(model, config=TrainerConfig()),
                engine=own,
                names=model_names(str(folder)),
                key=key,
            )
            settings = uvicorn.Config(make_app(hosted), log_level="warning")
            server = _Server(settings)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", hosted
            finally:
                server.should_exit = server.force_exit = True
                await task
