"""Code that all routes share: the tenant of a key, the body of a request, its limits, answers."""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from rookery.errors import ConfigError
from rookery.remote.records import PROTOBUF
from rookery.runtime.app_shell import CLIENT_CLOSED, key_of
from rookery.service.config import read_recipient
from rookery.service.drawing import ANSWER_MIB
from rookery.service.fair_queue import FairSemaphore
from rookery.service.keys import Keys
from rookery.service.records import encode_parts
from rookery.service.service import Service, new_id
from rookery.service.state import State
from rookery.service.wire import LARGE_BYTES, as_json, parse_json, refuse_half_characters
from rookery.service.work import Command, Form, Refusal, bad

__all__ = [
    "Body",
    "DrawSource",
    "DrawingRoute",
    "Handler",
    "JsonRoute",
    "RequestContext",
    "SlicedResponse",
    "Tenant",
    "digest_of",
    "encode_answer",
    "find_source",
    "model_names",
    "tenant_of",
    "write_answer",
]


ANONYMOUS = "local"
"""Tenant of all clients if no keys are required."""


@dataclass(frozen=True, slots=True)
class Body:
    """Content and cost of a request."""

    data: bytes
    form: Form = "json"
    tokens: int = 1
    base_model: str = ""
    digest: str = ""
    """Hash of the content, if equal contents may have different bytes."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The service and the keys that open it; None if it requires none."""

    service: Service
    keys: Keys | None

    @property
    def state(self) -> State:
        return self.service.context.state

    @property
    def body_bytes(self) -> int:
        return int(self.service.context.config.limits.body_mib * 2**20)

    def command(
        self, kind: str, tenant: str, request: BaseModel, *, owner: str, seq: int
    ) -> Command:
        """Make a command from a JSON request of a model."""
        body = as_json(request)
        return self.work(kind, tenant, Body(body), owner=owner, seq=seq)

    def work(self, kind: str, tenant: str, body: "Body", *, owner: str, seq: int) -> Command:
        """Make a command from a request of a model or a sampling session."""
        return Command(
            kind=kind,
            id=new_id("req"),
            tenant=tenant,
            time=time.time(),
            body=body.data,
            form=body.form,
            owner=owner,
            base_model=body.base_model or self._base_model(owner),
            seq=seq,
            tokens=body.tokens,
            key=f"{owner}#{seq}",
            digest=body.digest or digest_of(kind.encode() + body.data),
        )

    def now(self) -> float:
        return time.time()

    def number(self, model_id: str, seq_id: int | None) -> int:
        """Return the number of a request; the next one for clients that send none."""
        if seq_id is None:
            return self.service.training.buffer(model_id).free_seq
        if seq_id < 1:
            raise bad(f"seq_id is {seq_id}; the requests of a model are numbered 1, 2, 3, ...")
        return seq_id

    def sample_number(self, seq_id: int | None) -> int:
        """Return the number of a sample request: any number will do."""
        return secrets.randbelow(2**62) if seq_id is None else seq_id

    def check_recipients(self, recipients: Sequence[str]) -> None:
        """Refuse unreadable age recipients before anything is written."""
        for recipient in recipients:
            read_recipient(recipient)

    def _base_model(self, owner: str) -> str:
        model = self.service.context.state.models.get(owner)
        return model.base_model if model is not None else ""


def tenant_of(request: Request) -> str:
    """Return the tenant of the request's key; refuse with 401 without a known key."""
    api: RequestContext = request.app.state.api
    if api.keys is None:
        tenant: str | None = ANONYMOUS
    else:
        key = key_of(request.headers)
        try:
            tenant = api.keys.tenant(key) if key else None
        except ConfigError as error:  # it is being edited; do not reveal its path
            raise Refusal(503, "The keys of this service cannot be read now.") from error
    if tenant is None:
        raise Refusal(
            401, "The key is missing or not known: make one with `rookery keys add NAME`."
        )
    return tenant


Tenant = Annotated[str, Depends(tenant_of)]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Names for models in requests: a base model, an adapter, the path of a checkpoint.


@dataclass(frozen=True, slots=True)
class DrawSource:
    """Weights to draw from; the base model if `blob` is empty."""

    base_model: str
    blob: str = ""


def find_source(api: RequestContext, tenant: str, name: str | None) -> DrawSource:
    """Return the weights of a name; for None, the first base model."""
    context = api.service.context
    if name is None:
        return DrawSource(next(iter(context.backends)))
    if name in context.backends:
        return DrawSource(name)
    if name.startswith("tinker://"):
        checkpoint = context.state.weights(tenant, name, now=api.now())
        return DrawSource(checkpoint.base_model, checkpoint.blob)
    adapter = context.state.adapters.get((tenant, name))
    if adapter is None:
        known = ", ".join(model_names(api, tenant))
        raise Refusal(404, f"There is no model {name!r:.200}. There are: {known:.600}.")
    return DrawSource(adapter.base_model, adapter.blob)


def model_names(api: RequestContext, tenant: str) -> list[str]:
    """Return base models, then the tenant's adapters and sampler checkpoints."""
    context = api.service.context
    adapters = [name for who, name in context.state.adapters if who == tenant]
    checkpoints = context.state.own_checkpoints(tenant, now=api.now())
    paths = [one.path for one in checkpoints if one.kind != "external_weights"]
    return [*context.backends, *adapters, *paths]


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """Route class for `APIRouter(route_class=JsonRoute)`."""

    def answering(self, handler: Handler) -> Handler:
        """Wrap the handler of requests whose body was read."""
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
                return await handler(request)  # the handler reads the body itself, or refuses it
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
    """A request whose body was already read and validated."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await request.receive()

        super().__init__(request.scope, receive)
        self._value = value

    async def json(self) -> Any:
        return self._value


class DrawingRoute(JsonRoute):
    """Stops computing when the client disconnects: otherwise a killed or impatient client would
    leave answers as long as the context to be drawn."""

    def answering(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            await request.body()  # kept for the handler: the next message is the disconnect
            answering = asyncio.create_task(handler(request))
            leaving = asyncio.create_task(_wait_disconnected(request))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return await answering if answering.done() else Response(status_code=CLIENT_CLOSED)
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

        return handle


async def _wait_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Large answers: written outside the event loop, and held once for any number of connections.


SLICE_BYTES = 1 << 18


class SlicedResponse(Response):
    """Sends its body slice by slice, each after the client has read the previous one: a server
    would copy the whole body for every client that does not read."""

    media_type = "application/json"

    def __init__(
        self, data: bytes, *, counts: Counter[str] | None = None, tenant: str = "", **rest: Any
    ) -> None:
        """`counts` gets the tenant's bytes in flight; None if the body is kept elsewhere too."""
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
    """Write JSON of what `describe` returns, with JsonRows as leaves, in a thread and in turn."""
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
