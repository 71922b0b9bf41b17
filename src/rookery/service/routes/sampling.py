"""Sampling sessions and samples; the results of all accepted requests."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from rookery.service.commands import EndSampler
from rookery.service.drawing import read_draw
from rookery.service.futures import Future
from rookery.service.routes.json_route import JsonRoute, SlicedResponse, write_answer
from rookery.service.routes.request_context import Body, RequestContext, Tenant
from rookery.service.wire.body import PROTOBUF, accepts_protobuf, as_json
from rookery.service.wire.records import ScoreBody
from rookery.service.wire.requests import (
    CancelFuture,
    CreateSamplingSession,
    JoinSamplingSession,
    RetrieveFuture,
    RetrieveFutures,
    Sample,
)
from rookery.service.wire.samples import samples_as_json
from rookery.service.wire.training import outputs_as_json
from rookery.service.work import Result, bad

__all__ = ["make_router"]


def make_router(api: RequestContext) -> APIRouter:
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
        """Let the weights of a sampling session go; what waits for it fails."""
        ended = EndSampler(sampling_session_id=sampler_id)
        await service.change("end_sampler", tenant, ended)
        return Response(status_code=204)


def _add_answers(router: APIRouter, api: RequestContext) -> None:
    service, context = api.service, api.service.context

    @router.post("/score")
    async def score(body: ScoreBody, tenant: Tenant) -> dict[str, Any]:
        """Log-probabilities of given tokens and of labels behind them."""
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
        # Before a body that is much too long is written and read again.
        service.drawing.max_tokens(sampler.base_model, asked=1, num_prompt=num_prompt)
        seq = api.sample_number(body.seq_id)
        data = as_json(body)
        content = Body(data, base_model=sampler.base_model)
        command = api.work("sample", tenant, content, owner=sampler.id, seq=seq)
        read_draw(context, service.drawing, command)  # refuses what can never be drawn
        return await service.accept(command)


def _add_results(router: APIRouter, api: RequestContext) -> None:
    service = api.service
    futures = service.context.futures
    limit_s = service.context.config.poll_s

    @router.post("/retrieve_future")
    async def retrieve(body: RetrieveFuture, request: Request, tenant: Tenant) -> Response:
        """The result when it is there within the poll's time; 408 with the place in the queue
        when it is not."""
        future = futures.get(body.request_id, tenant=tenant)
        result = await futures.wait(future, limit_s=limit_s)
        if result is None:
            return _pending(api, future)
        if result.form == "json":
            return SlicedResponse(result.payload)
        if accepts_protobuf(request.headers.get("accept", "")):
            return SlicedResponse(result.payload, media_type=PROTOBUF)
        return await write_answer(api, tenant, lambda: _document(future, result))

    @router.post("/retrieve_futures")
    async def retrieve_many(body: RetrieveFutures, tenant: Tenant) -> dict[str, Any]:
        """Which samples of a session are finished since the cursor."""
        sampler = service.context.state.sampler(tenant, body.target.sampling_session_id)
        cursor = _cursor(body.prev_cursor)
        finished, cursor = await futures.finished_since(sampler.id, cursor=cursor, limit_s=limit_s)
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
