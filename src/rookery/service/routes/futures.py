"""Results of accepted requests: one at a time, or those of a sampling session together."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from rookery.service.futures import Future
from rookery.service.routes.json_route import JsonRoute, SlicedResponse, write_answer
from rookery.service.routes.request_context import RequestContext, Tenant
from rookery.service.wire.body import PROTOBUF, accepts_protobuf
from rookery.service.wire.requests import CancelFuture, RetrieveFuture, RetrieveFutures
from rookery.service.wire.samples import samples_as_json
from rookery.service.wire.training import outputs_as_json
from rookery.service.work import Result, bad

__all__ = ["make_router"]


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["results"], route_class=JsonRoute)
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

    return router


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
