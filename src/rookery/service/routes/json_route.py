"""Routes that take JSON: text that can be neither stored nor tokenized does not reach them."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from rookery.service.wire.body import PROTOBUF, refuse_half_characters

__all__ = ["JsonRoute"]


class JsonRoute(APIRoute):
    """What `APIRouter(route_class=JsonRoute)` makes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if not request.headers.get("content-type", "").startswith(PROTOBUF):
                refuse_half_characters(await request.body())
            return await handler(request)

        return handle
