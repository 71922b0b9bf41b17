"""Sampling: sessions that name what is drawn from, and samples."""

from typing import Any

from fastapi import APIRouter, Response

from rookery.service.commands import EndSampler
from rookery.service.drawing import read_draw
from rookery.service.routes.json_route import JsonRoute
from rookery.service.routes.request_context import Body, RequestContext, Tenant
from rookery.service.wire.body import as_json
from rookery.service.wire.records import ScoreBody
from rookery.service.wire.requests import CreateSamplingSession, JoinSamplingSession, Sample
from rookery.service.work import bad

__all__ = ["make_router"]


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=JsonRoute)
    _add_samplers(router, api)
    _add_answers(router, api)
    return router


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
