"""The server: a trainer and an engine of one model over HTTP.

| POST /v1/...                                   | body               | answer               |
|------------------------------------------------|--------------------|----------------------|
| info                                           |                    | ServerInfo           |
| create?name=, remove?name=                     | LoraStart; nothing |                      |
| put_adapter?name=, get_adapter?name=           | safetensors        | safetensors          |
| load?name=, save?name=                         | safetensors        | safetensors          |
| forward_backward, forward, optim_step          | records            | records              |
| sample, score                                  | records            | records              |
| serve, unserve                                 | safetensors; ref   | ModelRef             |

An error is 400 with {"error", "kind"}. After a restart of the server, its earlier clients get 409:
their trainees are gone.
"""

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from rookery.config import parse_config
from rookery.embedded import EmbeddedEngine
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
from rookery.runtime.app_shell import ErrorAnswers, Refusal, key_check
from rookery.runtime.app_shell import make_app as make_shell
from rookery.slots import SlottedModel
from rookery.train import LoraTrainer, initial_adapter
from rookery.types import Adapter, ModelRef, OptimStep, SampleRequest, ScoreRequest, TrainRequest

__all__ = ["Hosted", "make_app"]

Method = Callable[[str, bytes], Awaitable[bytes]]
"""(name in the query, body) -> answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """The model, its trainer and its engine."""

    model: SlottedModel
    trainer: LoraTrainer
    engine: EmbeddedEngine
    names: frozenset[str]
    ranks: int = 1
    key: str = ""
    """Key that clients must send; empty for none."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def info(self) -> ServerInfo:
        return ServerInfo(
            instance=self.instance,
            base=self.engine.base.version,
            names=tuple(sorted(self.names)),
            linear_layers=self.engine.linear_layers,
            max_rank=self.engine.max_rank,
            context_tokens=self.engine.context_tokens,
            ranks=self.ranks,
        )


def make_app(hosted: Hosted) -> FastAPI:
    app = make_shell(
        "Rookery on Megatron",
        answers=ErrorAnswers(
            status=lambda _: 400,
            document=lambda error, text: {"error": text, "kind": type(error).__name__},
        ),
        check=key_check(hosted.key, "MEGATRON_SERVER_KEY is missing or wrong."),
        openapi_url=None,
    )
    methods = {**_trainee_methods(hosted), **_record_methods(hosted)}

    @app.post("/v1/{method}", response_model=None)
    async def call(method: str, request: Request) -> Response:
        if request.headers.get(INSTANCE_HEADER, hosted.instance) != hosted.instance:
            raise Refusal(409, "It was started anew and has lost its trainees.")
        if method not in methods:
            raise Refusal(404, f"There are: {', '.join(methods)}.")
        name, body = request.query_params.get("name", ""), await request.body()
        return Response(await methods[method](name, body))

    return app


def _trainee_methods(hosted: Hosted) -> dict[str, Method]:
    trainer = hosted.trainer

    def add(name: str, start: Adapter) -> bytes:
        remove(name)
        trainer.add(name, start)
        return b""

    def remove(name: str) -> bytes:
        if name in trainer.trainees:
            trainer.remove(name)
        return b""

    def create(name: str, body: bytes) -> bytes:
        start = parse_config(LoraStart, read_json(body), origin="the body")
        return add(
            name,
            initial_adapter(hosted.model, start.lora, name=name, base=start.base, seed=start.seed),
        )

    async def load(name: str, body: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:  # ranks are processes of one machine
            path = Path(folder) / "state"
            await asyncio.to_thread(path.write_bytes, body)
            await trainer.load(name, path)
        return b""

    async def save(name: str, _: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            await trainer.save(name, path)
            return await asyncio.to_thread(path.read_bytes)

    return {
        "create": _in_thread(create),
        "remove": _in_thread(lambda name, _: remove(name)),
        "put_adapter": _in_thread(lambda name, body: add(name, read_adapter_bytes(body))),
        "get_adapter": _in_thread(lambda name, _: adapter_bytes(trainer.adapter(name))),
        "load": load,
        "save": save,
    }


def _record_methods(hosted: Hosted) -> dict[str, Method]:
    trainer, engine = hosted.trainer, hosted.engine

    async def info(_: str, __: bytes) -> bytes:
        return write_json(hosted.info.model_dump())

    async def serve(_: str, body: bytes) -> bytes:
        return write_json(await engine.load(await asyncio.to_thread(read_adapter_bytes, body)))

    async def unserve(_: str, body: bytes) -> bytes:
        await engine.unload(read_record(ModelRef, read_json(body)))
        return b""

    return {
        "info": info,
        "forward_backward": _of_records(TrainRequest, trainer.forward_backward),
        "forward": _of_records(TrainRequest, trainer.forward),
        "optim_step": _of_records(OptimStep, trainer.optim_step),
        "sample": _of_records(SampleRequest, engine.sample),
        "score": _of_records(ScoreRequest, engine.score),
        "serve": serve,
        "unserve": unserve,
    }


def _of_records(kind: type[Any], call: Callable[[list[Any]], Awaitable[Any]]) -> Method:
    async def method(_: str, body: bytes) -> bytes:
        outputs = await call(await asyncio.to_thread(read_records, kind, body))
        return await asyncio.to_thread(write_json, outputs)

    return method


def _in_thread(call: Callable[[str, bytes], bytes]) -> Method:
    async def method(name: str, body: bytes) -> bytes:
        return await asyncio.to_thread(call, name, body)

    return method
