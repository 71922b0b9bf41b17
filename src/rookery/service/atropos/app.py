"""The application of a gateway: its routes, who may call them, and how large a body may be."""

import asyncio
import base64
import secrets
import zlib

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.environments.atropos.delivery import Delivery
from rookery.environments.atropos.engine_side import EngineSide
from rookery.environments.atropos.gateway import Gateway
from rookery.errors import EngineDownError, FleetDownError, RookeryError, RunError
from rookery.service.atropos import engine, groups
from rookery.service.fair_queue import READERS, FairSemaphore
from rookery.service.wire.body import too_large
from rookery.service.work import Refusal, bad

__all__ = ["make_atropos_app"]

GZIP_BYTES = 1000
"""Answers from this size on are compressed for clients that read it."""


def make_atropos_app(
    gateway: Gateway,
    *,
    delivery: Delivery | None,
    side: EngineSide | None,
    key: str,
    limit_bytes: int,
) -> FastAPI:
    """Without a delivery the trainer is in this process; without an engine side there is none."""
    app = FastAPI(title="Rookery", summary="The Atropos API, with groups that are not lost.")
    app.state.reading = FairSemaphore(READERS)
    app.include_router(groups.make_router(gateway, delivery))
    if side is not None:
        app.include_router(engine.make_router(side))
    app.add_exception_handler(RookeryError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_BYTES)
    app.add_middleware(AuthMiddleware, limit_bytes=limit_bytes, key=key)
    return app


class AuthMiddleware:
    """Every request: keys are checked, and bodies are read up to the limit and decompressed."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int, key: str) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_key(headers)
            body = await self._body(receive)
            if body is None:
                return
            if "gzip" in headers.get("content-encoding", ""):
                body = await asyncio.to_thread(self._inflate, body)
                changed = MutableHeaders(scope=scope)
                del changed["content-encoding"]
                changed["content-length"] = str(len(body))
        except Refusal as refusal:
            answer = JSONResponse(_document(str(refusal)), status_code=refusal.status)
            await answer(scope, receive, send)
            return
        is_read = False

        async def receive_body() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_body, send)

    def _check_key(self, headers: Headers) -> None:
        key = _given_key(headers.get("authorization", ""))
        if self._key and not secrets.compare_digest(key.encode(), self._key.encode()):
            raise Refusal(
                401,
                "This gateway asks for a key: send it as Authorization: Bearer KEY, or give its "
                "address as http://any:KEY@HOST:PORT.",
            )

    async def _body(self, receive: Receive) -> bytes | None:
        """None: the client has gone before all of it came."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limit_bytes:
                raise too_large(self._limit_bytes)
            if not message.get("more_body"):
                return b"".join(parts)

    def _inflate(self, body: bytes) -> bytes:
        reader = zlib.decompressobj(wbits=31)
        try:
            plain = reader.decompress(body, self._limit_bytes + 1)
        except zlib.error as error:
            raise bad(f"The body is not gzip, as its Content-Encoding says: {error}.") from error
        if len(plain) > self._limit_bytes:
            raise too_large(self._limit_bytes)
        return plain


def _given_key(authorization: str) -> str:
    """Of a bearer token, or the password of an address: atroposlib sends its API nothing else."""
    kind, _, credentials = authorization.partition(" ")
    if kind.lower() != "basic":
        return authorization.removeprefix("Bearer ").strip()
    try:
        return base64.b64decode(credentials).decode().partition(":")[2]
    except ValueError:
        return ""


async def _refused(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    # Environments send again what failed here (5xx), and drop what they did wrong (4xx).
    status = 503 if isinstance(error, EngineDownError | FleetDownError | RunError) else 422
    if isinstance(error, Refusal):
        status = error.status
    return JSONResponse(_document(str(error)), status_code=status)


async def _invalid(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return JSONResponse(_document(f"{place}: {first['msg']}."), status_code=422)


def _document(sentence: str) -> dict[str, str]:
    return {"error": sentence, "detail": sentence}
