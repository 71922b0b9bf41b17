"""What clients ask first: flags, health, which models there are; and sessions."""

import logging
from typing import Any

from fastapi import APIRouter, Request, Response

from rookery.service.backend import Backend
from rookery.service.commands import EndSession
from rookery.service.refusals import missing
from rookery.service.routes.gate import Gate, Tenant
from rookery.service.routes.json_route import JsonRoute
from rookery.service.wire.requests import CreateSession, FinishSession, SessionId

__all__ = ["make_router"]

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


def make_router(gate: Gate) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["sessions"], route_class=JsonRoute)
    _add_facts(router, gate)
    _add_sessions(router, gate)
    return router


def _add_facts(router: APIRouter, gate: Gate) -> None:
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
            for name, backend in gate.service.desk.backends.items()
        ]
        return {"supported_models": models}

    @router.get("/engines")
    async def engines(_: Tenant) -> dict[str, Any]:
        """What Rookery's own client must know of each base model."""
        return {name: _facts(backend) for name, backend in gate.service.desk.backends.items()}

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


def _add_sessions(router: APIRouter, gate: Gate) -> None:
    state = gate.state

    @router.post("/create_session")
    async def create_session(body: CreateSession, tenant: Tenant) -> dict[str, Any]:
        gate.service.admission.check_rate(tenant)
        gate.service.admission.check_sessions(tenant)
        return await gate.service.change("create_session", tenant, body)

    @router.post("/session_heartbeat")
    async def heartbeat(body: SessionId, tenant: Tenant) -> dict[str, str]:
        gate.service.heartbeat(tenant, body.session_id)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, body: FinishSession, tenant: Tenant) -> Response:
        session = state.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise missing("session", session_id)
        if not session.is_over:
            await gate.service.change("end_session", tenant, EndSession(session_id=session_id))
        logger.info("session %s ended: %s", session_id, body.reason)
        return Response(status_code=204)

    @router.get("/sessions")
    async def sessions(tenant: Tenant, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        own = [s.id for s in reversed(state.sessions.values()) if s.tenant == tenant]
        return {"sessions": own[max(offset, 0) :][: max(limit, 0)]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str, tenant: Tenant) -> dict[str, Any]:
        found = state.sessions.get(session_id)
        if found is None or found.tenant != tenant:
            raise missing("session", session_id)
        samplers = [s.id for s in state.samplers.values() if s.session_id == session_id]
        return {
            "training_run_ids": [model.id for model in state.models_of(session_id)],
            "sampler_ids": samplers,
            "user_metadata": found.metadata,
            "display_name": found.display_name,
        }
