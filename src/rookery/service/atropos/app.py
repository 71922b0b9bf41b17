"""The application of a gateway: its routes, who may call them, and how large a body may be."""

import asyncio
import zlib

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.app_shell import ErrorAnswers, key_check, make_app, too_large
from rookery.environments.atropos.delivery import Delivery
from rookery.environments.atropos.engine_side import EngineSide
from rookery.environments.atropos.gateway import Gateway
from rookery.service.atropos import engine, groups
from rookery.service.fair_queue import READERS, FairSemaphore
from rookery.service.work import status_of

__all__ = ["make_atropos_app"]

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
    app.include_router(groups.make_router(gateway, delivery))
    if side is not None:
        app.include_router(engine.make_router(side))
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
