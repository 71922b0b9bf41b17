"""The application of a gateway: the routes of `run-api`, who may call them, how large a body is."""

import asyncio
import gzip
import zlib
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.app_shell import ErrorAnswers, key_check, make_app, too_large
from rookery.compat.atropos import engine_routes
from rookery.compat.atropos.engine_side import EngineSide
from rookery.compat.atropos.gateway import Delivery, Gateway
from rookery.compat.atropos.registry import Registration, TrainerRegistration
from rookery.compat.atropos.scored_group import ScoredGroup
from rookery.errors import TaskError
from rookery.service.fair_queue import READERS, FairSemaphore
from rookery.service.work import Refusal, bad, status_of

__all__ = ["make_atropos_app"]

_ONE, _MANY = TypeAdapter(ScoredGroup), TypeAdapter(list[ScoredGroup])
_EMPTY = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params",
          "inference_logprobs", "messages", "images")  # fmt: skip
_OWN_TRAINER = (
    "This gateway belongs to a run that trains by itself: stop that run, or start a gateway alone "
    "with `rookery grpo gateway` and give trainers its address."
)


class EnvIdentifier(BaseModel):
    """Which environment is asking."""

    env_id: int


def _make_router(gateway: Gateway, delivery: Delivery | None) -> APIRouter:
    """Without a delivery, batches go to the trainer in this process alone."""
    router = APIRouter(tags=["atropos"])
    _add_taking_part(router, gateway, delivery)
    _add_groups(router, gateway)
    _add_batches(router, gateway, delivery)
    return router


def _add_taking_part(router: APIRouter, gateway: Gateway, delivery: Delivery | None) -> None:
    registry = gateway.registry

    @router.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @router.post("/register")
    async def register(trainer: TrainerRegistration) -> dict[str, int]:
        if delivery is None:
            raise Refusal(409, _OWN_TRAINER)
        try:
            number = registry.enter(trainer)
        except TaskError as error:
            raise Refusal(409, str(error)) from error
        delivery.begin()
        gateway.step = max(gateway.step, trainer.starting_step)
        return {"uuid": int(number)}

    @router.post("/register-env")
    async def register_env(registration: Registration) -> dict[str, Any]:
        environment = await gateway.register_env(registration)
        if environment is None or registry.trainer is None:
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": environment.id,
            "wandb_name": environment.name,
            "checkpoint_dir": registry.trainer.checkpoint_dir,
            "starting_step": gateway.step,
            "checkpoint_interval": registry.trainer.save_checkpoint_interval,
            "num_steps": registry.trainer.num_steps,
        }

    @router.post("/disconnect-env")
    async def disconnect_env(who: EnvIdentifier) -> dict[str, str]:
        try:
            await gateway.disconnect_env(who.env_id)
        except TaskError as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    @router.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        trainer = registry.trainer
        return {
            "group": None if trainer is None else trainer.wandb_group,
            "project": None if trainer is None else trainer.wandb_project,
        }

    @router.get("/info")
    async def info() -> dict[str, int]:
        trainer = registry.trainer
        return {
            "batch_size": -1 if trainer is None else trainer.batch_size,
            "max_token_len": -1 if trainer is None else trainer.max_token_len,
        }


def _add_groups(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/scored_data")
    async def scored_data(request: Request) -> dict[str, Any]:
        group = await _read(_ONE, request, gateway)
        buffered = await gateway.accept(group, is_gone=request.is_disconnected)
        if buffered is None:
            return {"status": "received"}
        return {"status": "buffered", "buffer_size": buffered}

    @router.post("/scored_data_list")
    async def scored_data_list(request: Request) -> dict[str, Any]:
        groups = await _read(_MANY, request, gateway)
        sizes = await gateway.accept_all(groups, is_gone=request.is_disconnected)
        kept = [size for size in sizes if size is not None]
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
        if kept:
            answer |= {"buffered": len(kept), "last_buffer_size": kept[-1]}
        return answer

    @router.get("/latest_example")
    async def latest_example() -> dict[str, Any]:
        if gateway.latest is None:
            return {name: [] for name in _EMPTY}
        return gateway.latest.model_dump(mode="json")

    @router.get("/status")
    async def status(trainer: str = "") -> dict[str, int]:
        if trainer:
            _hear_trainer(gateway, trainer)
        return {"current_step": gateway.step, "queue_size": len(gateway.queue.groups)}

    @router.get("/status-env")
    async def status_env(who: EnvIdentifier) -> dict[str, Any]:
        return gateway.registry.status(who.env_id, gateway.queue.groups, step=gateway.step)


def _add_batches(router: APIRouter, gateway: Gateway, delivery: Delivery | None) -> None:
    @router.get("/batch")
    async def batch(request: Request, after: int | None = None, trainer: str = "") -> Response:
        if delivery is None or gateway.registry.trainer is None:
            said = _OWN_TRAINER if delivery is None else "Register first with /register."
            return JSONResponse({"status": "error", "message": said, "batch": []})
        _hear_trainer(gateway, trainer)
        gateway.is_started = True
        number, entries = await delivery.next(after)
        if not entries:
            return JSONResponse({"batch": None})
        groups = [queued.group for queued in entries]
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        return await asyncio.to_thread(_batch_response, number, groups, is_packed=is_packed)

    @router.get("/reset_data")
    async def reset_data() -> PlainTextResponse:
        if delivery is None:
            raise Refusal(409, _OWN_TRAINER)
        await delivery.drop_all()
        for environment in gateway.registry.environments:
            await gateway.disconnect_env(environment.id)
        gateway.step, gateway.is_started = 0, False
        gateway.registry.leave()
        return PlainTextResponse("Reset successful")


def _hear_trainer(gateway: Gateway, trainer: str) -> None:
    try:
        gateway.registry.hear_trainer(trainer)
    except TaskError as error:
        raise Refusal(409, str(error)) from error


def _batch_response(number: int, groups: list[ScoredGroup], *, is_packed: bool) -> Response:
    """A batch may have millions of tokens: it is written, and compressed, in a thread."""
    text = b'{"batch":%b,"batch_id":%d}' % (_MANY.dump_json(groups), number)
    headers = {"Content-Encoding": "gzip"} if is_packed else None
    content = gzip.compress(text, compresslevel=1) if is_packed else text
    return Response(content, media_type="application/json", headers=headers)


async def _read(kind: TypeAdapter[Any], request: Request, gateway: Gateway) -> Any:
    """Large bodies are parsed in a thread."""
    try:
        return await asyncio.to_thread(kind.validate_json, await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        said = f"{place}: {first['msg']}."
        gateway.note_refusal(said)
        raise bad(said) from error


GZIP_BYTES = 1000
"""Answers from this size on are compressed for clients that read it."""
NO_KEY = (
    "This gateway asks for a key: send it as Authorization: Bearer KEY, or give its address as "
    "http://any:KEY@HOST:PORT."
)


def make_atropos_app(
    gateway: Gateway,
    *,
    delivery: Delivery | None,
    side: EngineSide | None,
    key: str,
    limit_bytes: int,
) -> FastAPI:
    """Without a delivery the trainer is in this process; without an engine side there is none."""
    app = make_app(
        "Rookery",
        summary="The Atropos API, with groups that are not lost.",
        answers=ErrorAnswers(status=_status),
        check=key_check(key, NO_KEY),
        limit_bytes=limit_bytes,
    )
    app.state.reading = FairSemaphore(READERS)
    app.include_router(_make_router(gateway, delivery))
    if side is not None:
        app.include_router(engine_routes.make_router(side))
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_BYTES)
    app.add_middleware(GunzipMiddleware, limit_bytes=limit_bytes)
    return app


def _status(error: Exception) -> int:
    """Environments send again what failed here (5xx), and drop what they did wrong (4xx)."""
    status = status_of(error)
    return 422 if status == 400 else status


class GunzipMiddleware:
    """Bodies that came compressed are read whole, and handed on plain."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "gzip" not in Headers(scope=scope).get(
            "content-encoding", ""
        ):
            await self._app(scope, receive, send)
            return
        changed, is_read = MutableHeaders(scope=scope), False
        del changed["content-encoding"], changed["content-length"]

        async def receive_plain() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read, parts, size = True, list[bytes](), 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return message
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self._limit_bytes:
                    raise HTTPException(413, str(too_large(self._limit_bytes)))
                if not message.get("more_body"):
                    body = await asyncio.to_thread(self._inflate, b"".join(parts))
                    return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_plain, send)

    def _inflate(self, body: bytes) -> bytes:
        reader = zlib.decompressobj(wbits=31)
        try:
            plain = reader.decompress(body, self._limit_bytes + 1)
        except zlib.error as error:
            sentence = f"The body is not gzip, as its Content-Encoding says: {error}."
            raise HTTPException(400, sentence) from error
        if len(plain) > self._limit_bytes:
            raise HTTPException(413, str(too_large(self._limit_bytes)))
        return plain
