"""The web application: the routes, how refusals are answered, and what every request passes.

app = make_app(service, keys=Keys(path))
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from rookery.app_shell import ErrorAnswers
from rookery.app_shell import make_app as make_shell
from rookery.reports import QueueStatus, ServiceStatus, TenantStatus
from rookery.service.keys import Keys
from rookery.service.openai import routes as openai
from rookery.service.openai import vllm
from rookery.service.routes import (
    checkpoints,
    plain,
    sampling,
    sessions,
    training,
)
from rookery.service.routes.request_context import RequestContext
from rookery.service.routes.sessions import fill_gap
from rookery.service.service import Service
from rookery.service.work import missing, status_of

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


INDEX = {
    "/openapi.json": "all routes, and what they take",
    "/v1/models": "the models, for OpenAI clients",
    "/api/v1/healthz": "whether it answers",
    "/status": "queues and tenants, to this machine alone",
    "/metrics": "numbers for Prometheus",
}
ROUTES = (sessions, training, sampling, checkpoints, plain, openai, vllm)


def make_app(
    service: Service,
    *,
    keys: Keys | None,
    render: Callable[[ServiceStatus], str] | None = None,
) -> FastAPI:
    """The application over a running service; without keys everybody is one tenant. `render` makes
    the status page. Only this machine is shown it and the numbers of each tenant: they have the
    names of all."""
    api, metrics = RequestContext(service, keys), service.context.metrics

    def note(path: str, status: int, seconds: float) -> None:
        metrics.requests.labels(path, status).inc()
        metrics.seconds.labels(path).observe(seconds)

    app = make_shell(
        "Rookery",
        summary="Sampling and training over HTTP, by the protocol of the tinker SDK.",
        answers=ErrorAnswers(
            status=status_of,
            sentence=service.context.sentence,
            document=lambda _, told: {"error": told, "detail": told, "category": "user"},
            before=fill_gap,
        ),
        limit_bytes=api.body_bytes,
        note=note,
    )
    app.state.api = api
    app.state.reading = service.reading
    for module in ROUTES:
        app.include_router(module.make_router(api))
    _add_pages(app, service, render)
    return app


def _add_pages(
    app: FastAPI, service: Service, render: Callable[[ServiceStatus], str] | None
) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> dict[str, Any]:
        """What this is, and where to look."""
        return {"name": "rookery", "version": app.version, "routes": INDEX}

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> PlainTextResponse:
        service.show_queues()
        text = service.context.metrics.text(has_tenants=_is_local(request))
        return PlainTextResponse(text)

    @app.get("/status", include_in_schema=False, response_model=None)
    async def status(request: Request, format: Literal["html", "json"] = "html") -> Response:
        if render is None or not _is_local(request):
            raise missing("page", "/status")
        told = read_status(service)
        return JSONResponse(asdict(told)) if format == "json" else HTMLResponse(render(told))


def _is_local(request: Request) -> bool:
    """Sent by a program of this machine, and not passed on by one."""
    host = request.client.host if request.client is not None else ""
    return host in ("127.0.0.1", "::1") and "x-forwarded-for" not in request.headers
