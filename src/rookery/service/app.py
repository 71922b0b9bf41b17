"""The web application: the routes, how refusals are answered, and what every request passes.

app = make_app(service, keys=Keys(path))
"""

import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.errors import RookeryError
from rookery.reports import QueueStatus, ServiceStatus, TenantStatus
from rookery.service.keys import Keys
from rookery.service.metrics import Metrics
from rookery.service.routes import (
    checkpoints,
    futures,
    openai,
    plain,
    sampling,
    sequences,
    sessions,
    training,
    vllm,
)
from rookery.service.routes.request_context import RequestContext
from rookery.service.routes.sessions import fill_gap
from rookery.service.service import Service
from rookery.service.wire.body import too_large
from rookery.service.work import Refusal, missing, status_of

__all__ = [
    "make_app",
    "read_status",
]

# What the operator sees of a running service.


def read_status(service: Service) -> ServiceStatus:
    """As it is now. Costs grow with what tenants have."""
    context, training, drawing = service.context, service.training, service.drawing
    live = Counter(model.tenant for model in context.state.models.values() if model.is_live)
    saved = Counter(checkpoint.tenant for checkpoint in context.state.checkpoints.values())
    tokens = context.metrics.tokens_by_tenant()
    names = sorted({*live, *saved, *tokens, *(s.tenant for s in context.state.sessions.values())})
    return ServiceStatus(
        models=tuple(context.backends),
        queues=(
            QueueStatus(
                name="training",
                num_waiting=training.num_waiting,
                tokens_waiting=training.tokens_waiting,
                tokens_per_s=training.throughput.per_s,
            ),
            QueueStatus(
                name="sampling",
                num_waiting=drawing.turns.num_waiting,
                tokens_waiting=drawing.turns.tokens_waiting,
                tokens_per_s=drawing.throughput.per_s,
            ),
        ),
        tenants=tuple(
            TenantStatus(
                name=name,
                num_pending=context.pending.count(name),
                num_models=live[name],
                num_checkpoints=saved[name],
                tokens=tokens.get(name, {}),
            )
            for name in names
        ),
        journal_bytes=context.wal.num_bytes,
    )


RETRY_AFTER_S = "1"
INDEX = {
    "/openapi.json": "all routes, and what they take",
    "/v1/models": "the models, for OpenAI clients",
    "/api/v1/healthz": "whether it answers",
    "/status": "queues and tenants, to this machine alone",
    "/metrics": "numbers for Prometheus",
}
ROUTES = (
    sessions, training, sampling, futures, checkpoints, plain, openai, vllm, sequences,
)  # fmt: skip


def make_app(
    service: Service,
    *,
    keys: Keys | None,
    render: Callable[[ServiceStatus], str] | None = None,
) -> FastAPI:
    """The application over a running service; without keys everybody is one tenant. `render` makes
    the status page. Only this machine is shown it and the numbers of each tenant: they have the
    names of all."""
    api = RequestContext(service, keys)
    app = FastAPI(
        title="Rookery",
        version=version("rookery"),
        summary="Sampling and training over HTTP, by the protocol of the tinker SDK.",
        docs_url=None,  # its pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.api = api
    app.state.reading = service.reading
    for module in ROUTES:
        app.include_router(module.make_router(api))
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RookeryError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unread)
    app.add_middleware(AuthMiddleware, limit_bytes=api.body_bytes, metrics=service.context.metrics)

    @app.get("/", include_in_schema=False)
    async def index() -> dict[str, Any]:
        """What this is, and where to look."""
        return {"name": "rookery", "version": app.version, "routes": INDEX}

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> PlainTextResponse:
        service.show_queues()
        text = service.context.metrics.text(has_tenants=_is_local(request))
        return PlainTextResponse(text)

    @app.get("/status", include_in_schema=False)
    async def status(request: Request) -> HTMLResponse:
        if render is None or not _is_local(request):
            raise missing("page", "/status")
        return HTMLResponse(render(read_status(service)))

    return app


def _is_local(request: Request) -> bool:
    """Sent by a program of this machine, and not passed on by one."""
    host = request.client.host if request.client is not None else ""
    return host in ("127.0.0.1", "::1") and "x-forwarded-for" not in request.headers


class AuthMiddleware:
    """Every request: bodies over the limit are refused as they arrive, and all are counted."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, num_bytes, status = time.monotonic(), 0, 500

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit_bytes:
                raise HTTPException(413, str(too_large(self._limit_bytes)))
            return message

        async def noted_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, counted_receive, noted_send)
        finally:
            # The route's pattern: ids in paths would make a number of its own each.
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    status = status_of(error)
    api: RequestContext = request.app.state.api
    sentence = api.service.context.sentence(error)
    if status not in (401, 429, 503):  # of nobody, or sent again
        await fill_gap(request, sentence)
    headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else None
    return JSONResponse(_document(sentence), status_code=status, headers=headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    lines = []
    for detail in error.errors():
        parts = [str(part) for part in detail["loc"] if part != "body"]
        # Which of several types it was validated as is no part of the place.
        place = ".".join(part for part in parts if not part.endswith("]")) or "the body"
        if detail["type"] == "json_invalid":
            place = f"The body is not JSON at character {place}"
        lines.append(f"{place}: {detail['msg'].removeprefix('Value error, ')}")
    sentence = f"{'; '.join(lines[:5])}."
    await fill_gap(request, sentence)
    return JSONResponse(_document(sentence), status_code=422)


async def _unread(_: Request, error: Exception) -> JSONResponse:
    """No route has read it: there is none, or the body is too large."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        _document(error.detail), status_code=error.status_code, headers=error.headers
    )


def _document(sentence: str) -> dict[str, str]:
    return {"error": sentence, "detail": sentence, "category": "user"}
