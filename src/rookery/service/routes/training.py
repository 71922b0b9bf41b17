"""Training: models, gradients, optimizer steps, saving and loading."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from rookery.errors import ConfigError, TrainError
from rookery.service.records import Model
from rookery.service.routes.json_route import JsonRoute
from rookery.service.routes.request_context import Body, RequestContext, Tenant, digest_of
from rookery.service.wire.body import LARGE_BYTES, PROTOBUF, as_json, inflate, parse_json
from rookery.service.wire.losses import train_request
from rookery.service.wire.records import CheckLoss, RecordCall
from rookery.service.wire.requests import (
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    GetInfo,
    LoadWeights,
    OptimStepRequest,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    WeightsInfo,
)
from rookery.service.wire.training import TrainCall, read_train_json, read_train_proto
from rookery.service.work import bad
from rookery.types import Json

__all__ = ["make_router"]


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["training"], route_class=JsonRoute)
    _add_models(router, api)
    _add_losses(router, api)
    _add_gradients(router, api)
    _add_weights(router, api)
    return router


def _add_models(router: APIRouter, api: RequestContext) -> None:
    context = api.service.context

    @router.post("/create_model")
    async def create_model(body: CreateModel, tenant: Tenant) -> dict[str, Any]:
        api.service.admission.check_rate(tenant)
        session = context.state.session(tenant, body.session_id)
        context.backend(body.base_model)
        shape = body.lora_config
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            kind = body.optimizer_config.type
            raise bad(f"The optimizer {kind!r:.60} is not supported: write adamw.")
        if not (shape.train_attn or shape.train_mlp or shape.train_unembed):
            raise bad("Nothing is to be trained: set train_attn, train_mlp or train_unembed.")
        model_id = f"{session.id}:train:{body.model_seq_id}"
        data = as_json(body)
        content = Body(data, base_model=body.base_model)
        command = api.work("create_model", tenant, content, owner=model_id, seq=0)
        return await api.service.accept(command)

    @router.post("/get_info")
    async def get_info(body: GetInfo, tenant: Tenant) -> dict[str, Any]:
        model = context.state.run(tenant, body.model_id)
        tokenizer = context.backend(model.base_model).tokenizer
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": model.base_model, "tokenizer_id": tokenizer},
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": model.base_model,
        }

    @router.post("/unload_model")
    async def unload_model(body: GetInfo, tenant: Tenant) -> dict[str, Any]:
        """End the training of a model; its checkpoints stay."""
        api.service.admission.check_rate(tenant)
        return await api.service.change("unload_model", tenant, body)

    @router.post("/weights_info")
    async def weights_info(body: WeightsInfo, tenant: Tenant) -> dict[str, Any]:
        now = api.now()
        checkpoint = context.state.checkpoint(tenant, body.tinker_path, now=now)
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": checkpoint.lora.rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
            "optimizer_config": {"type": "adamw"},
        }


def _add_losses(router: APIRouter, api: RequestContext) -> None:
    @router.post("/check_loss", status_code=204)
    async def check_loss(body: CheckLoss, tenant: Tenant) -> Response:
        """Whether the trainer has a loss with these options."""
        api.service.admission.check_rate(tenant)
        await _check_loss(api, body.loss, body.options)
        return Response(status_code=204)

    @router.post("/create_custom_loss")
    async def create_custom_loss(body: CreateCustomLoss, tenant: Tenant) -> dict[str, Any]:
        """A loss of the client's own as a graph of tensor operations, which the trainer runs."""
        api.service.admission.check_rate(tenant)
        api.service.context.state.session(tenant, body.session_id)
        api.service.admission.check_losses(tenant)
        await _check_loss(api, "custom", body.model_dump(include={"inputs", "graph"}))
        return await api.service.change("create_custom_loss", tenant, body)


def _add_gradients(router: APIRouter, api: RequestContext) -> None:
    context = api.service.context

    @router.post("/forward_backward")
    @router.post("/forward", include_in_schema=False)
    async def forward_backward(request: Request, tenant: Tenant) -> dict[str, Any]:
        """Gradients (or, with forward_only, none) of a model on data: protobuf or JSON."""
        api.service.admission.check_rate(tenant)
        raw = await request.body()
        encoding = request.headers.get("content-encoding", "")
        is_proto = request.headers.get("content-type", "").startswith(PROTOBUF)

        def read() -> tuple[TrainCall | RecordCall, Body]:
            body = inflate(raw, encoding=encoding, limit_bytes=api.body_bytes)
            call, content = _read(body, is_proto=is_proto)
            model = context.state.model(tenant, call.model_id)
            context_tokens = context.backend(model.base_model).engine.context_tokens
            train_request(
                call,
                context_tokens=context_tokens,
                custom=lambda loss_id: context.state.loss(tenant, loss_id),
            )
            return call, content

        is_short = len(raw) <= LARGE_BYTES and not encoding
        reading = api.service.reading.in_thread
        call, content = read() if is_short else await reading(tenant, read, tokens=len(raw))
        if isinstance(call, RecordCall):
            await _check_loss(api, call.request.loss, call.request.loss_options)
        seq = api.number(call.model_id, call.seq_id)
        kind = "forward" if call.forward_only else "forward_backward"
        command = api.work(kind, tenant, content, owner=call.model_id, seq=seq)
        return await api.service.accept(command)

    @router.post("/optim_step")
    async def optim_step(body: OptimStepRequest, tenant: Tenant) -> dict[str, Any]:
        if body.adam_params is None and body.optimizer_params is not None:
            kind = body.optimizer_params.get("type")
            raise bad(f"The optimizer {kind!r:.60} is not supported: send adam_params.")
        return await _accept(api, "optim_step", tenant, body)


def _add_weights(router: APIRouter, api: RequestContext) -> None:
    admission = api.service.admission

    @router.post("/save_weights")
    async def save_weights(body: SaveWeights, tenant: Tenant) -> dict[str, Any]:
        admission.check_checkpoints(tenant)
        return await _accept(api, "save_weights", tenant, body)

    @router.post("/save_weights_for_sampler")
    async def save_for_sampler(body: SaveForSampler, tenant: Tenant) -> dict[str, Any]:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise bad("Give a path to save under, or sampling_session_seq_id, and not both.")
        admission.check_checkpoints(tenant)
        return await _accept(api, "save_weights_for_sampler", tenant, body)

    @router.post("/save_weights_external")
    async def save_external(body: SaveExternal, tenant: Tenant) -> dict[str, Any]:
        admission.check_checkpoints(tenant)
        if body.age_encryption_recipients:
            await asyncio.to_thread(api.check_recipients, body.age_encryption_recipients)
        return await _accept(api, "save_weights_external", tenant, body)

    @router.post("/load_weights")
    async def load_weights(body: LoadWeights, tenant: Tenant) -> dict[str, Any]:
        api.service.context.state.weights(tenant, body.path, now=api.now())
        return await _accept(api, "load_weights", tenant, body)

    @router.post("/copy_weights")
    async def copy_weights(body: CopyWeights, tenant: Tenant) -> dict[str, Any]:
        admission.check_checkpoints(tenant)
        return await api.service.change("copy_weights", tenant, body)


async def _accept(api: RequestContext, kind: str, tenant: str, body: BaseModel) -> dict[str, Any]:
    """A JSON request of a model, in its turn."""
    api.service.admission.check_rate(tenant)
    fields = body.model_dump(include={"model_id", "seq_id"})
    model: Model = api.service.context.state.model(tenant, fields["model_id"])
    seq = api.number(model.id, fields["seq_id"])
    return await api.service.accept(api.command(kind, tenant, body, owner=model.id, seq=seq))


async def _check_loss(api: RequestContext, loss: str, options: Mapping[str, Json]) -> None:
    trainees = next(iter(api.service.context.backends.values())).trainees
    try:
        await trainees.check_loss(loss, options)
    except (ConfigError, TrainError) as error:
        raise bad(str(error)) from error


def _read(body: bytes, *, is_proto: bool) -> tuple[TrainCall | RecordCall, Body]:
    call: TrainCall | RecordCall
    if is_proto:
        call, canonical = read_train_proto(body)
        digest = digest_of(canonical)
    else:
        call, digest = read_train_json(parse_json(body)), digest_of(body)
    form = Body(
        body, form="proto" if is_proto else "json", tokens=max(call.num_tokens, 1), digest=digest
    )
    return call, form
