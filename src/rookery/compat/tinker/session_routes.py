"""HTTP for the SDK: flags, health, models, sessions, samples, and results of all requests."""

import json
import logging
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError

from rookery.compat.tinker.schema import samples_as_json
from rookery.compat.tinker.training import outputs_as_json
from rookery.remote.messages import ForwardBackwardRequest
from rookery.remote.records import PROTOBUF
from rookery.service.commands import EndSampler, EndSession
from rookery.service.drawing import read_draw
from rookery.service.futures import Future
from rookery.service.request_context import (
    Body,
    JsonRoute,
    RequestContext,
    SlicedResponse,
    Tenant,
    digest_of,
    tenant_of,
    write_answer,
)
from rookery.service.requests import (
    CancelFuture,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    JoinSamplingSession,
    RetrieveFuture,
    RetrieveFutures,
    Sample,
    SessionId,
)
from rookery.service.wire import (
    ScoreBody,
    accepts_protobuf,
    as_json,
    inflate,
    inflate_head,
    load_json,
)
from rookery.service.work import Backend, Refusal, Result, bad, missing

__all__ = ["fill_gap", "make_sampling_router", "make_session_router"]


# A refused request keeps its number, so that later ones are not held up.
#
# The SDK numbers the requests of a model before it sends them, and goes on with the next number
# after a refusal. Without an entry for the refused one, the service would wait for it forever.


HEAD_BYTES = 1024
"""Leading bytes of a message that hold its model and number."""
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
    """Record the refusal of a request that can never be done under the request's number."""
    if request.url.path not in _PATHS or status in (401, 429, 503):  # unowned, or resent
        return
    api: RequestContext = request.app.state.api
    raw = await request.body()
    with suppress(Refusal):  # another tenant's, done before, or too many wait
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
    """Return the model and number that a body names; None if it names none."""
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
    """Parse a message up to its model and number: the data after them may be damaged."""
    size, place = _varint(head, 1)
    _, end = _varint(head, place + size + 1)
    return ForwardBackwardRequest.FromString(head[:end])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Read a protobuf number, seven bits per byte; return it with its end."""
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
"""Settings for clients: chunks of 1,024 data, compressed with zstd; one poll for all samples of a
session; custom losses sent as graphs."""
DYNAMIC_FLAGS = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


def make_session_router(api: RequestContext) -> APIRouter:
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
        """Facts about each base model, for Rookery's own client."""
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


def make_sampling_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=JsonRoute)
    _add_samplers(router, api)
    _add_answers(router, api)
    results = APIRouter(prefix="/api/v1", tags=["results"], route_class=JsonRoute)
    _add_results(results, api)
    whole = APIRouter()
    for part in (router, results):
        whole.include_router(part)
    return whole


def _add_samplers(router: APIRouter, api: RequestContext) -> None:
    service, context = api.service, api.service.context

    @router.post("/create_sampling_session")
    async def create(body: CreateSamplingSession, tenant: Tenant) -> dict[str, Any]:
        service.admission.check_rate(tenant)
        if bool(body.base_model) == bool(body.model_path):
            raise bad("Give base_model or model_path, and not both.")
        service.admission.check_samplers(tenant, body.sampler_id)
        if body.base_model:
            context.backend(body.base_model)
        if body.model_path:
            context.state.weights(tenant, body.model_path, now=api.now())
        return await service.change("create_sampling_session", tenant, body)

    @router.post("/join_sampling_session")
    async def join(body: JoinSamplingSession, tenant: Tenant) -> dict[str, Any]:
        return await service.change("join_sampling_session", tenant, body)

    @router.get("/samplers/{sampler_id}")
    async def sampler_info(sampler_id: str, tenant: Tenant) -> dict[str, Any]:
        sampler = context.state.sampler(tenant, sampler_id)
        tokenizer = context.backend(sampler.base_model).tokenizer
        return {
            "sampler_id": sampler.id,
            "base_model": tokenizer,
            "model_path": sampler.path or None,
        }

    @router.delete("/samplers/{sampler_id}", status_code=204)
    async def end_sampler(sampler_id: str, tenant: Tenant) -> Response:
        """Drop the weights of a sampling session; its waiting requests fail."""
        ended = EndSampler(sampling_session_id=sampler_id)
        await service.change("end_sampler", tenant, ended)
        return Response(status_code=204)


def _add_answers(router: APIRouter, api: RequestContext) -> None:
    service, context = api.service, api.service.context

    @router.post("/score")
    async def score(body: ScoreBody, tenant: Tenant) -> dict[str, Any]:
        """Score given tokens, and labels after them."""
        service.admission.check_rate(tenant)
        sampler = context.state.sampler(tenant, body.sampling_session_id)
        context_tokens = context.backend(sampler.base_model).engine.context_tokens
        if body.start > len(body.tokens) or (
            context_tokens is not None and len(body.tokens) > context_tokens
        ):
            raise bad(
                f"There are {len(body.tokens)} tokens, scored from {body.start}: this model reads "
                f"at most {context_tokens}, and start is at most their number."
            )
        content = Body(as_json(body, exclude_none=False), base_model=sampler.base_model)
        seq = api.sample_number(body.seq_id)
        command = api.work("score", tenant, content, owner=sampler.id, seq=seq)
        return await service.accept(command)

    @router.post("/asample")
    async def asample(body: Sample, tenant: Tenant) -> dict[str, Any]:
        service.admission.check_rate(tenant)
        service.admission.check_samples(body.num_samples)
        if not body.sampling_session_id:
            raise bad("Give sampling_session_id, as create_sampling_session answers it.")
        sampler = context.state.sampler(tenant, body.sampling_session_id)
        num_prompt = sum(len(chunk.tokens) for chunk in body.prompt.chunks)
        # Checked before a far too long body is written and read again.
        service.drawing.max_tokens(sampler.base_model, asked=1, num_prompt=num_prompt)
        seq = api.sample_number(body.seq_id)
        data = as_json(body)
        content = Body(data, base_model=sampler.base_model)
        command = api.work("sample", tenant, content, owner=sampler.id, seq=seq)
        read_draw(context, service.drawing, command)  # refuses samples that can never be drawn
        return await service.accept(command)


def _add_results(router: APIRouter, api: RequestContext) -> None:
    service = api.service
    futures = service.context.futures
    config = service.context.config

    @router.post("/retrieve_future")
    async def retrieve(body: RetrieveFuture, request: Request, tenant: Tenant) -> Response:
        """Return the result if it comes within the poll's time; else 408 with its queue place."""
        future = futures.get(body.request_id, tenant=tenant)
        result = await futures.wait(future, limit_s=config.poll_s)
        if result is None:
            return _pending(api, future)
        if result.form == "json":
            return SlicedResponse(result.payload)
        if accepts_protobuf(request.headers.get("accept", "")):
            return SlicedResponse(result.payload, media_type=PROTOBUF)
        return await write_answer(api, tenant, lambda: _document(future, result))

    @router.post("/retrieve_futures")
    async def retrieve_many(body: RetrieveFutures, tenant: Tenant) -> dict[str, Any]:
        """Return the samples of a session that finished since the cursor."""
        sampler = service.context.state.sampler(tenant, body.target.sampling_session_id)
        cursor = _cursor(body.prev_cursor)
        finished, cursor = await futures.finished_since(
            sampler.id, cursor=cursor, limit_s=config.poll_s
        )
        completions = [
            {
                "state": "finished",
                "request_id": future.id,
                "response_payload_uncompressed_size": len(future.result.payload),
            }
            for future in finished
            if future.result is not None
        ]
        return {"completions": completions, "cursor": cursor}

    @router.post("/cancel_future", status_code=204)
    async def cancel(body: CancelFuture, tenant: Tenant) -> Response:
        await service.cancel(tenant, body.request_id)
        return Response(status_code=204)


def _pending(api: RequestContext, future: Future) -> Response:
    state, reason = api.service.describe(future)
    document = {
        "type": "try_again",
        "request_id": future.id,
        "queue_state": state,
        "queue_state_reason": reason,
    }
    return Response(json.dumps(document), status_code=408, media_type="application/json")


def _document(future: Future, result: Result) -> dict[str, Any]:
    is_sample = "sample_sequence_ids" in future.reply
    return (samples_as_json if is_sample else outputs_as_json)(result.payload)


def _cursor(cursor: int | str | None) -> int:
    if cursor is None or cursor == "":
        return 0
    try:
        return max(int(cursor), 0)
    except ValueError as error:
        raise bad(f"prev_cursor is {cursor!r:.60}; send the cursor of the last answer.") from error
