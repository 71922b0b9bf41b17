"""What clients ask first: flags, health, which models there are; and sessions."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError

from rookery.service.commands import EndSession
from rookery.service.routes.json_route import JsonRoute
from rookery.service.routes.request_context import (
    Body,
    RequestContext,
    Tenant,
    digest_of,
    tenant_of,
)
from rookery.service.wire.body import PROTOBUF, inflate, inflate_head, load_json
from rookery.service.wire.requests import CreateSession, FinishSession, SessionId
from rookery.service.wire.schema import ForwardBackwardRequest
from rookery.service.work import Backend, Refusal, missing

__all__ = [
    "Source",
    "fill_gap",
    "find_source",
    "make_router",
    "model_names",
]

# What plain and OpenAI clients may call a model: a base model, an adapter, a tinker:// path.


@dataclass(frozen=True, slots=True)
class Source:
    """What is drawn from; without a blob the base model."""

    base_model: str
    blob: str = ""


def find_source(api: RequestContext, tenant: str, name: str | None) -> Source:
    """The weights of a name; None: the first base model."""
    context = api.service.context
    if name is None:
        return Source(next(iter(context.backends)))
    if name in context.backends:
        return Source(name)
    if name.startswith("tinker://"):
        checkpoint = context.state.weights(tenant, name, now=api.now())
        return Source(checkpoint.base_model, checkpoint.blob)
    adapter = context.state.adapters.get((tenant, name))
    if adapter is None:
        known = ", ".join(model_names(api, tenant))
        raise Refusal(404, f"There is no model {name!r:.200}. There are: {known:.600}.")
    return Source(adapter.base_model, adapter.blob)


def model_names(api: RequestContext, tenant: str) -> list[str]:
    """Base models, then the tenant's adapters and sampler checkpoints."""
    context = api.service.context
    adapters = [name for who, name in context.state.adapters if who == tenant]
    checkpoints = context.state.own_checkpoints(tenant, now=api.now())
    paths = [one.path for one in checkpoints if one.kind != "external_weights"]
    return [*context.backends, *adapters, *paths]


# Refused requests keep their number, so that the ones behind them are not held up.
#
# The SDK numbers the requests of a model before it sends them and goes on with the next number
# after a refusal: without an entry for the refused one, the service would wait for it for ever.


HEAD_BYTES = 1024
"""Of a message: its model and its number are in these."""
_PATHS = frozenset(
    f"/api/v1/{name}"
    for name in (
        "forward",
        "forward_backward",
        "load_weights",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
    )
)


async def fill_gap(request: Request, status: int, sentence: str) -> None:
    """Give the number of a request that can never be done to its refusal."""
    if request.url.path not in _PATHS or status in (401, 429, 503):  # of nobody, or sent again
        return
    api: RequestContext = request.app.state.api
    raw = await request.body()
    with suppress(Refusal):  # of another tenant, done before, or too many wait: nothing to fill
        tenant = tenant_of(request)
        number = await api.service.reading.in_thread(
            tenant, lambda: _number(raw, request, api.body_bytes), tokens=len(raw)
        )
        if number is None:
            return
        model_id, seq = number
        api.state.model(tenant, model_id)
        body = Body(sentence.encode(), digest=digest_of(raw))
        command = api.work("refused", tenant, body, owner=model_id, seq=seq)
        await api.service.accept(command)


def _number(raw: bytes, request: Request, limit_bytes: int) -> tuple[str, int] | None:
    """The model and the number that a body names; None when it names none."""
    encoding = request.headers.get("content-encoding", "")
    try:
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            message = _first_fields(inflate_head(raw, encoding=encoding, num_bytes=HEAD_BYTES))
            model_id, seq = message.model_id, message.seq_id
        else:
            document = load_json(inflate(raw, encoding=encoding, limit_bytes=limit_bytes))
            model_id, seq = document["model_id"], document["seq_id"]
    except (Refusal, DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return None
    is_number = isinstance(model_id, str) and isinstance(seq, int) and 0 < seq < 2**63
    return (model_id, seq) if is_number else None


def _first_fields(head: bytes) -> Any:
    """The message without its data, which may be too large or damaged: model and number come
    first."""
    size, place = _varint(head, 1)
    _, end = _varint(head, place + size + 1)
    return ForwardBackwardRequest.FromString(head[:end])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of protobuf, seven bits in a byte, and where it ends."""
    value, shift = 0, 0
    while data[place] >= 128:
        value |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


logger = logging.getLogger(__name__)

FLAGS = {
    "proto_compress_fwdbwd": True,
    "fwdbwd_max_chunk_len": 1024,
    "sample_use_retrieve_futures": True,
    "custom_loss_server_side": True,
}
"""What clients are told to do: chunks of 1,024 data, compressed with zstd, one poll for all samples
of a session, and losses of their own sent as graphs."""
DYNAMIC_FLAGS = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["sessions"], route_class=JsonRoute)
    _add_facts(router, api)
    _add_sessions(router, api)
    return router


def _add_facts(router: APIRouter, api: RequestContext) -> None:
    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return FLAGS

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return DYNAMIC_FLAGS

    @router.get("/get_server_capabilities")
    async def capabilities(_: Tenant) -> dict[str, Any]:
        models = [
            {
                "model_name": name,
                "max_context_length": backend.engine.context_tokens,
                "trainable": True,
                "sampleable": True,
            }
            for name, backend in api.service.context.backends.items()
        ]
        return {"supported_models": models}

    @router.get("/engines")
    async def engines(_: Tenant) -> dict[str, Any]:
        """What Rookery's own client must know of each base model."""
        return {name: _facts(backend) for name, backend in api.service.context.backends.items()}

    @router.post("/telemetry")
    async def telemetry(request: Request, tenant: Tenant) -> dict[str, str]:
        body = await request.body()
        logger.debug("telemetry of %s: %d bytes", tenant, len(body))
        return {"status": "accepted"}


def _facts(backend: Backend) -> dict[str, Any]:
    engine = backend.engine
    return {
        "name": engine.base.name,
        "version": engine.base.version,
        "linear_layers": dict(engine.linear_layers),
        "max_rank": engine.max_rank,
        "context_tokens": engine.context_tokens,
        "tokenizer": backend.tokenizer,
    }


def _add_sessions(router: APIRouter, api: RequestContext) -> None:
    state = api.state

    @router.post("/create_session")
    async def create_session(body: CreateSession, tenant: Tenant) -> dict[str, Any]:
        api.service.admission.check_rate(tenant)
        api.service.admission.check_sessions(tenant)
        return await api.service.change("create_session", tenant, body)

    @router.post("/session_heartbeat")
    async def heartbeat(body: SessionId, tenant: Tenant) -> dict[str, str]:
        api.service.heartbeat(tenant, body.session_id)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, body: FinishSession, tenant: Tenant) -> Response:
        session = state.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise missing("session", session_id)
        if not session.is_over:
            await api.service.change("end_session", tenant, EndSession(session_id=session_id))
        logger.info("session %s ended: %s", session_id, body.reason)
        return Response(status_code=204)

    @router.get("/sessions")
    async def sessions(tenant: Tenant, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        ids = [s.id for s in reversed(state.sessions.values()) if s.tenant == tenant]
        return {"sessions": ids[max(offset, 0) :][: max(limit, 0)]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str, tenant: Tenant) -> dict[str, Any]:
        session = state.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise missing("session", session_id)
        samplers = [s.id for s in state.samplers.values() if s.session_id == session_id]
        return {
            "training_run_ids": [model.id for model in state.models_of(session_id)],
            "sampler_ids": samplers,
            "user_metadata": session.metadata,
            "display_name": session.display_name,
        }
