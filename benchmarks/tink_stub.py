"""A service in its own process, whose engine and trainer only wait for a given time.

    async with stub_service(folder, seconds_per_token=0.0005) as url: ...

A sample whose prompt begins with token 1 is never answered.
"""

import asyncio
import multiprocessing
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from rookery.compat.serving import make_app, open_service
from rookery.compose.http_server import answering, listen_all
from rookery.runs import Run
from rookery.service.config import ServiceConfig
from rookery.service.keys import Keys
from rookery.service.work import Backend
from rookery.testing import BASE, FakeAdapters, FakeSampler, FakeTrainer
from rookery.types import (
    Completion,
    Json,
    Message,
    ModelRef,
    SampleRequest,
    TokenIds,
    TrainOutput,
    TrainRequest,
)

BLOCKED = 1
"""First token of prompts that are never answered."""
NAME = "stub"
START_S = 300.0


class StubEngine(FakeSampler, FakeAdapters):
    """Engine whose samples all take the same time."""

    base = BASE
    linear_layers: Mapping[str, tuple[int, int]] = {}
    max_rank = 64
    context_tokens = 8192
    is_remote = False
    is_batch_invariant = True
    token_counts: Mapping[str, int] = {}

    def __init__(self, sample_s: float) -> None:
        FakeSampler.__init__(self)
        FakeAdapters.__init__(self)
        self._sample_s = sample_s

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        if any(request.prompt[0] == BLOCKED for request in requests):
            await asyncio.Event().wait()
        await asyncio.sleep(self._sample_s)
        return await super().sample(requests)


class StubTrainer(FakeTrainer):
    """Trainer whose passes take a time proportional to their tokens."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__("unused")
        self._seconds_per_token = seconds_per_token

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        tokens = sum(len(datum.tokens) for request in requests for datum in request.data)
        await asyncio.sleep(tokens * self._seconds_per_token)
        return await super().forward_backward(requests)


class StubFolders:
    """Store without adapters."""

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        return ModelRef(name=name, version=folder.name)

    async def unload(self, ref: ModelRef) -> None:
        """Nothing was loaded."""


class StubCodec:
    """Codec with one token per character."""

    def encode(self, text: str) -> TokenIds:
        return tuple(map(ord, text))

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        del tools
        return self.encode("".join(message.content for message in messages))

    def decode(self, tokens: TokenIds) -> str:
        return "".join(chr(token % 256) for token in tokens)


def _backend(seconds_per_token: float, sample_s: float) -> Backend:
    trainer = StubTrainer(seconds_per_token)
    return Backend(
        engine=StubEngine(sample_s),
        trainer=trainer,
        trainees=trainer,
        folders=StubFolders(),
        codec=StubCodec(),
        tokenizer=NAME,
        merge=shutil.copytree,
    )


def _serve(
    folder: Path, keys: Path, seconds_per_token: float, sample_s: float, pipe: Connection
) -> None:
    async def run() -> None:
        run = Run.create(folder.parent, kind="serve", name=folder.name, config={})
        backends = {NAME: _backend(seconds_per_token, sample_s)}
        with run, listen_all("127.0.0.1", [0], remedy="") as listeners:
            async with (
                open_service(run, backends, ServiceConfig()) as service,
                answering(make_app(service, keys=Keys(keys)), listeners) as url,
            ):
                pipe.send(url)
                await asyncio.Event().wait()

    asyncio.run(run())


@asynccontextmanager
async def stub_service(
    folder: Path, *, keys: Path, seconds_per_token: float = 0.0, sample_s: float = 0.0
) -> AsyncIterator[str]:
    """Run the service inside the block; yields its address."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(
        target=_serve, args=(folder, keys, seconds_per_token, sample_s, theirs), daemon=True
    )
    process.start()
    try:
        if not await asyncio.to_thread(ours.poll, START_S):
            raise RuntimeError("the stub service did not start")
        yield ours.recv()
    finally:
        process.kill()  # a stop would wait for thousands of requests
        process.join()
