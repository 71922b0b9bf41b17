"""The shell of every web application: keys, limits on bodies, and answers to errors.

app = make_app("Rookery", answers=ErrorAnswers(status=status_of), limit_bytes=2**20)
"""

import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.errors import RookeryError, ServiceError

__all__ = [
    "CLIENT_CLOSED",
    "ErrorAnswers",
    "Refusal",
    "key_check",
    "key_of",
    "make_app",
    "too_large",
]

RETRY_AFTER_S = "1"
CLIENT_CLOSED = 499


class Refusal(ServiceError):
    """Refuses a request with an HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def too_large(limit_bytes: int) -> Refusal:
    """The refusal of a body over the limit."""
    return Refusal(
        413,
        f"The body is larger than {limit_bytes / 2**20:g} MiB: send fewer data in one request, or "
        "raise limits.body_mib of the service.",
    )


def key_of(headers: Mapping[str, str]) -> str:
    """The key of a request: X-API-Key, a bearer token, or the password of an address; "" if there
    is none."""
    if key := headers.get("x-api-key", ""):
        return key
    kind, _, credentials = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return headers.get("authorization", "").removeprefix("Bearer ").strip()
    try:
        return base64.b64decode(credentials).decode().partition(":")[2]
    except ValueError:
        return ""


def key_check(key: str, sentence: str) -> Callable[[Headers], None]:
    """Return a check that refuses requests without this key; "" accepts all."""

    def check(headers: Headers) -> None:
        if key and not secrets.compare_digest(key_of(headers).encode(), key.encode()):
            raise Refusal(401, sentence)

    return check


async def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswers:
    """How an application answers errors."""

    status: Callable[[Exception], int]
    """HTTP status of a RookeryError that is no Refusal."""
    sentence: Callable[[Exception], str] = str
    document: Callable[[Exception, str], Mapping[str, str]] = lambda _, sentence: {
        "error": sentence,
        "detail": sentence,
    }
    before: Callable[[Request, int, str], Awaitable[None]] = _nothing
    """Called with the status and the sentence before a request is answered that a route has
    read."""

    async def answer(self, request: Request, error: Exception) -> JSONResponse:
        headers: Mapping[str, str] | None = None
        if isinstance(error, HTTPException):  # no route has read it: unknown path, or too large
            status, sentence, headers = error.status_code, error.detail, error.headers
        elif isinstance(error, RequestValidationError):
            status, sentence = 422, _invalid(error)
        else:
            status = error.status if isinstance(error, Refusal) else self.status(error)
            sentence = self.sentence(error)
            headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else None
        if not isinstance(error, HTTPException):
            await self.before(request, status, sentence)
        return JSONResponse(self.document(error, sentence), status_code=status, headers=headers)


def _invalid(error: RequestValidationError) -> str:
    lines = []
    for detail in error.errors():
        parts = [str(part) for part in detail["loc"] if part != "body"]
        # pydantic adds the tried member of a union to the place.
        place = ".".join(part for part in parts if not part.endswith("]")) or "the body"
        if detail["type"] == "json_invalid":
            place = f"The body is not JSON at character {place}"
        lines.append(f"{place}: {detail['msg'].removeprefix('Value error, ')}")
    return f"{'; '.join(lines[:5])}."


def make_app(
    title: str,
    *,
    answers: ErrorAnswers,
    check: Callable[[Headers], None] = lambda _: None,
    limit_bytes: int | None = None,
    note: Callable[[str, int, float], None] = lambda *_: None,
    **options: Any,
) -> FastAPI:
    """Make an application without routes. `check` refuses requests by their headers, before their
    bodies are read. `note` is called with route, status and seconds of each request."""
    app = FastAPI(
        title=title,
        version=version("rookery"),
        docs_url=None,  # its pages load scripts from a CDN
        redoc_url=None,
        **options,
    )
    for kind in (RookeryError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answers.answer)
    app.add_middleware(
        AuthMiddleware, answers=answers, check=check, limit_bytes=limit_bytes, note=note
    )
    return app


class AuthMiddleware:
    """Checks the key of every request, refuses bodies over the limit as they arrive, and notes its
    end."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        answers: ErrorAnswers,
        check: Callable[[Headers], None],
        limit_bytes: int | None,
        note: Callable[[str, int, float], None],
    ) -> None:
        self._app = app
        self._answers = answers
        self._check = check
        self._limit_bytes = limit_bytes
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
        except Refusal as refusal:
            answer = await self._answers.answer(Request(scope, receive), refusal)
            await answer(scope, receive, send)
            return
        started, num_bytes, status = time.monotonic(), 0, 500

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if self._limit_bytes is not None and num_bytes > self._limit_bytes:
                raise HTTPException(413, str(too_large(self._limit_bytes)))
            return message

        async def noted_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, counted_receive, noted_send)
        except ClientDisconnect:  # during its body: there is no client to answer
            status = CLIENT_CLOSED
        finally:
            # The route's pattern: with ids, every path would have a metric of its own.
            path = getattr(scope.get("route"), "path", "other")
            self._note(path, status, time.monotonic() - started)
