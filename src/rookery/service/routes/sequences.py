"""Turns of chats that were stored, as training data: listed, read, deleted."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from rookery.service.commands import SequenceId
from rookery.service.routes.json_route import JsonRoute
from rookery.service.routes.request_context import RequestContext, Tenant

__all__ = ["make_router"]


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["sequences"], route_class=JsonRoute)

    @router.get("/sequences")
    async def sequences(tenant: Tenant, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        stored = list(api.state.sequences.get(tenant, {}).values())
        page = stored[max(offset, 0) :][: max(limit, 0)]
        rows = [{"id": one.id, "model": one.model, "created": one.created} for one in page]
        return {"sequences": rows, "total_count": len(stored)}

    @router.get("/sequences/{sequence_id}")
    async def sequence(sequence_id: str, tenant: Tenant) -> dict[str, Any]:
        """The turn, and `datum`: its arrays as forward_backward takes them."""
        stored = api.state.sequence(tenant, sequence_id)
        return {**asdict(stored), "datum": stored.datum()}

    @router.delete("/sequences/{sequence_id}", status_code=204)
    async def remove(sequence_id: str, tenant: Tenant) -> Response:
        await api.service.change("remove_sequence", tenant, SequenceId(id=sequence_id))
        return Response(status_code=204)

    return router
