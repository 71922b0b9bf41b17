"""The service for its clients: the tinker SDK's format, and the routes of every peer.

async with open_service(run, backends, config) as service:
    app = make_app(service, keys=Keys(path))
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

from rookery.compat.openai import routes, vllm
from rookery.compat.tinker import format, session_routes, training_routes
from rookery.reports import ServiceStatus
from rookery.runs import Run
from rookery.service import app, service
from rookery.service.config import ServiceConfig
from rookery.service.keys import Keys
from rookery.service.work import Backend

__all__ = ["ROUTES", "make_app", "open_service"]

ROUTES = (
    session_routes.make_session_router,
    training_routes.make_training_router,
    session_routes.make_sampling_router,
    training_routes.make_checkpoint_router,
    app.make_router,
    routes.make_router,
    vllm.make_router,
)


def open_service(
    run: Run, backends: Mapping[str, Backend], config: ServiceConfig
) -> AbstractAsyncContextManager[service.Service]:
    """Call `rookery.service.service.open_service` with the tinker format."""
    return service.open_service(run, backends, config, format=format)


def make_app(
    opened: service.Service,
    *,
    keys: Keys | None,
    render: Callable[[ServiceStatus], str] | None = None,
) -> FastAPI:
    """Call `rookery.service.app.make_app` with the routes of all peers."""
    return app.make_app(
        opened, keys=keys, routes=ROUTES, before=session_routes.fill_gap, render=render
    )
