"""Routes that take JSON: bodies without a known key are not read, and text that can be neither
stored nor tokenized does not reach them. Large bodies are parsed and validated beside the event
loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from rookery.app_shell import CLIENT_CLOSED
from rookery.service.drawing import ANSWER_MIB
from rookery.service.fair_queue import FairSemaphore
from rookery.service.records import encode_parts
from rookery.service.routes.request_context import RequestContext, tenant_of
from rookery.service.wire.body import LARGE_BYTES, PROTOBUF, parse_json, refuse_half_characters
from rookery.service.work import bad

__all__ = [
    "DrawingRoute",
    "Handler",
    "JsonRoute",
    "SlicedResponse",
    "encode_answer",
    "write_answer",
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
            reading: FairSemaphore = request.app.state.reading
            value, errors = await reading.in_thread(
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


# Large answers: written beside the event loop, and held once, however many connections read them.


SLICE_BYTES = 1 << 18


class SlicedResponse(Response):
    """A body that its client gets a slice at a time, the next when it has read the last: a server
    would copy the whole for every client that does not read."""

    media_type = "application/json"

    def __init__(
        self, data: bytes, *, counts: Counter[str] | None = None, tenant: str = "", **rest: Any
    ) -> None:
        """Counted for the tenant while it is on its way, unless it is kept elsewhere too."""
        super().__init__(data, **rest)
        self._counts = Counter[str]() if counts is None else counts
        self._tenant = tenant

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        self._counts[self._tenant] += len(self.body)
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            for place in range(0, max(len(self.body), 1), SLICE_BYTES):
                part = bytes(self.body[place : place + SLICE_BYTES])
                has_more = place + SLICE_BYTES < len(self.body)
                await send({"type": "http.response.body", "body": part, "more_body": has_more})
        finally:
            self._counts[self._tenant] -= len(self.body)


async def write_answer(
    api: RequestContext, tenant: str, describe: Callable[[], Mapping[str, Any]]
) -> Response:
    """JSON of what `describe` gives, whose ends may be Rows; both in a thread, and in turn."""
    service = api.service
    service.admission.check_answers(tenant)
    data = await service.reading.in_thread(tenant, lambda: encode_answer(describe()), tokens=1)
    return SlicedResponse(data, counts=service.context.answers, tenant=tenant)


def encode_answer(document: Mapping[str, Any]) -> bytes:
    parts, num_bytes = [], 0
    for part in encode_parts(document):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > ANSWER_MIB * 2**20:
            raise bad(
                f"The answer has more than {ANSWER_MIB} MiB: ask for fewer samples or tokens in "
                "one request, or for less about each."
            )
    return b"".join(parts)
