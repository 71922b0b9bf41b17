"""Routes that take JSON: bodies without a known key are not read, and text that can be neither
stored nor tokenized does not reach them."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from rookery.service.routes.gate import tenant_of
from rookery.service.wire.body import PROTOBUF, refuse_half_characters

__all__ = ["JsonRoute"]


class JsonRoute(APIRoute):
    """What `APIRouter(route_class=JsonRoute)` makes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        needs_key = any(one.call is tenant_of for one in self.dependant.dependencies)

        async def handle(request: Request) -> Response:
            if needs_key:  # before the body, which the framework parses first
                tenant_of(request)
            if not request.headers.get("content-type", "").startswith(PROTOBUF):
                refuse_half_characters(await request.body())
            return await handler(request)

        return handle
