"""Routes that take JSON: bodies without a known key are not read, and text that can be neither
stored nor tokenized does not reach them. Large bodies are parsed and validated beside the event
loop.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Message

from rookery.service.routes.gate import Gate, tenant_of
from rookery.service.wire.body import LARGE_BYTES, PROTOBUF, parse_json, refuse_half_characters

__all__ = [
    "DrawingRoute",
    "Handler",
    "JsonRoute",
]

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """What `APIRouter(route_class=JsonRoute)` makes."""

    def answering(self, handler: Handler) -> Handler:
        """What answers requests whose body was read."""
        return handler

    def get_route_handler(self) -> Handler:
        handler = self.answering(super().get_route_handler())
        field = self.body_field
        needs_key = any(one.call is tenant_of for one in self.dependant.dependencies)

        async def handle(request: Request) -> Response:
            # Before the body, which the framework parses first.
            tenant = tenant_of(request) if needs_key else ""
            if request.headers.get("content-type", "").startswith(PROTOBUF):
                return await handler(request)
            body = await request.body()
            if len(body) <= LARGE_BYTES:
                refuse_half_characters(body)
                return await handler(request)
            if field is None or "json" not in request.headers.get("content-type", ""):
                return await handler(request)  # it reads the body itself, or refuses it
            gate: Gate = request.app.state.gate
            value, errors = await gate.service.reading.in_thread(
                tenant,
                lambda: field.validate(parse_json(body), loc=("body",)),
                tokens=len(body),
            )
            if errors:
                raise RequestValidationError(errors)
            return await handler(_LargeRequest(request, body, value))

        return handle


class _LargeRequest(Request):
    """A request whose body was read before, and validated: that is not done again."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await request.receive()

        super().__init__(request.scope, receive)
        self._value = value

    async def json(self) -> Any:
        return self._value


# Routes that draw while their client waits: what nobody waits for is not drawn to its end.


CLIENT_CLOSED = 499


class DrawingRoute(JsonRoute):
    """Ends what it computes when nobody waits for it: a client that was killed, or lost patience
    and asks again, would leave answers as long as the context to be drawn."""

    def answering(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            await request.body()  # kept for the handler: what is received after it is the end
            answering = asyncio.create_task(handler(request))
            leaving = asyncio.create_task(_left(request))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return await answering if answering.done() else Response(status_code=CLIENT_CLOSED)
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

        return handle


async def _left(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
