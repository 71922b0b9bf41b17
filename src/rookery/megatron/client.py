"""The client: a Megatron server as a Trainer, and as an Engine.

    async with open_megatron("http://localhost:5000") as server:
        trainer, engine = MegatronTrainer(server), MegatronEngine(server)
        await trainer.create("poet", LoraStart(lora=LoraConfig(), base="smollm2", seed=1))
        [output] = await trainer.forward_backward([TrainRequest(trainee="poet", data=data)])

Nothing is sent twice: a training call whose answer was lost may have been done. Trainees end with
the server; `save` and `load` bring them back.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rookery import errors
from rookery.config import parse_config
from rookery.errors import EngineDownError, RookeryError, TrainError, boundary
from rookery.megatron.wire import (
    INSTANCE_HEADER,
    LoraStart,
    ServerInfo,
    adapter_bytes,
    read_adapter_bytes,
    read_json,
    read_record,
    read_records,
    write_json,
)
from rookery.ports import Publisher
from rookery.runs.disk import write_file
from rookery.types import (
    Adapter,
    Completion,
    ModelRef,
    OptimStep,
    SampleRequest,
    Score,
    ScoreRequest,
    StepOutput,
    TrainOutput,
    TrainRequest,
)

__all__ = ["MegatronEngine", "MegatronServer", "MegatronTrainer", "open_megatron"]

CONNECT_S = 5.0
CALL_S = 3600.0
"""Longest time of one call, including its wait for others on the server."""
_KINDS: dict[str, type[RookeryError]] = {
    name: getattr(errors, name) for name in errors.__all__ if name.endswith("Error")
}


class MegatronServer:
    """One start of a server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, info: ServerInfo | None) -> None:
        self.url = url
        self._session = session
        self._info = info

    @property
    def info(self) -> ServerInfo:
        assert self._info is not None, "open_megatron asks for it"
        return self._info

    async def call(
        self,
        method: str,
        body: bytes = b"",
        *,
        name: str = "",
        down: type[RookeryError] = TrainError,
    ) -> bytes:
        """Return the answer. `down` is raised if the server does not answer or was restarted; its
        own errors are raised as the server raised them."""
        headers = {} if self._info is None else {INSTANCE_HEADER: self._info.instance}
        try:
            async with self._session.post(
                f"{self.url}/v1/{method}", params={"name": name}, data=body, headers=headers
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            detail = " ".join(str(error).split()) or type(error).__name__
            raise down(
                f"The Megatron server can't be reached at {self.url}: {detail}. Start it with "
                "`torchrun --nproc-per-node 1 -m rookery.megatron --model FOLDER --port PORT`, "
                "then this program again; training since the last save is lost."
            ) from error
        if response.status == 200:
            return answer
        is_ours = response.content_type == "application/json"
        said = read_json(answer) if is_ours else {"error": f"status {response.status}"}
        if response.status == 400:
            raise _KINDS.get(str(said.get("kind")), down)(said["error"])
        raise down(f"The Megatron server at {self.url} refuses {method}: {said.get('error', said)}")

    async def records(
        self, method: str, requests: Sequence[Any], *, down: type[RookeryError]
    ) -> bytes:
        body = await asyncio.to_thread(write_json, list(requests))
        return await self.call(method, body, down=down)


@asynccontextmanager
async def open_megatron(url: str, *, key: str = "") -> AsyncIterator[MegatronServer]:
    """Connect to the server at this address, which must answer."""
    limit = aiohttp.ClientTimeout(total=CALL_S, sock_connect=CONNECT_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
        answer = await MegatronServer(url.rstrip("/"), session, None).call("info")
        info = parse_config(ServerInfo, read_json(answer), origin=url)
        yield MegatronServer(url.rstrip("/"), session, info)


class MegatronTrainer:
    """A Trainer whose trainees are on a server. Its calls are sent one after another."""

    def __init__(self, server: MegatronServer, *, publisher: Publisher | None = None) -> None:
        self._server = server
        self._publisher = publisher
        # Held by one call at a time, in their order; each ends within CALL_S.
        self._turn = asyncio.Lock()

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._records("forward_backward", requests, TrainOutput)

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._records("forward", requests, TrainOutput)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        return await self._records("optim_step", steps, StepOutput)

    async def save(self, trainee: str, path: Path) -> None:
        """Write the same file as a local trainer does."""
        state = await self._call("save", name=trainee)
        await asyncio.to_thread(write_file, path, state, scratch=path.parent)

    async def load(self, trainee: str, path: Path) -> None:
        with boundary(TrainError, f"reading the trainer state {path}", foreign=(OSError,)):
            state = await asyncio.to_thread(path.read_bytes)
        await self._call("load", state, name=trainee)

    async def publish(self, trainee: str) -> ModelRef:
        if self._publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        return await self._publisher.publish(await self.adapter(trainee))

    async def create(self, trainee: str, start: LoraStart | Adapter) -> None:
        """Create a trainee; an existing one of that name is replaced."""
        if isinstance(start, LoraStart):
            await self._call("create", write_json(start.model_dump()), name=trainee)
        else:
            body = await asyncio.to_thread(adapter_bytes, start)
            await self._call("put_adapter", body, name=trainee)

    async def remove(self, trainee: str) -> None:
        """Idempotent."""
        await self._call("remove", name=trainee)

    async def adapter(self, trainee: str) -> Adapter:
        """Return its weights after all calls so far."""
        body = await self._call("get_adapter", name=trainee)
        return await asyncio.to_thread(read_adapter_bytes, body)

    async def _call(self, method: str, body: bytes = b"", *, name: str) -> bytes:
        async with self._turn:
            return await self._server.call(method, body, name=name)

    async def _records(self, method: str, requests: Sequence[Any], kind: type[Any]) -> list[Any]:
        async with self._turn:
            answer = await self._server.records(method, requests, down=TrainError)
        return await asyncio.to_thread(read_records, kind, answer)


class MegatronEngine:
    """An Engine on a server: its base model, and adapters sent to it."""

    is_remote = True
    is_batch_invariant = False

    def __init__(self, server: MegatronServer) -> None:
        self._server = server
        self.base = ModelRef(name="base", version=server.info.base)
        self.linear_layers: Mapping[str, tuple[int, int]] = server.info.linear_layers
        self.max_rank = server.info.max_rank
        self.context_tokens: int | None = server.info.context_tokens
        self.token_counts: Mapping[str, int] = {}

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        answer = read_json(await self._server.records("sample", requests, down=EngineDownError))
        return [tuple(read_record(Completion, one) for one in row) for row in answer]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        answer = await self._server.records("score", requests, down=EngineDownError)
        return read_records(Score, answer)

    async def load(self, adapter: Adapter) -> ModelRef:
        body = await asyncio.to_thread(adapter_bytes, adapter)
        answer = await self._server.call("serve", body, down=EngineDownError)
        return read_record(ModelRef, read_json(answer))

    async def unload(self, ref: ModelRef) -> None:
        await self._server.call("unserve", write_json(ref), down=EngineDownError)
