"""HTTP for the SDK: training, saving and loading; checkpoints, downloads and stored chats."""

import asyncio
import hashlib
import hmac
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import BaseModel
from starlette.background import BackgroundTask

from rookery.compat.tinker.training import (
    TrainCall,
    read_train_json,
    read_train_proto,
    train_request,
)
from rookery.errors import ConfigError, RunError, TrainError
from rookery.remote.records import PROTOBUF
from rookery.service.commands import CheckpointPath, CheckpointTtl, SequenceId
from rookery.service.config import write_archive
from rookery.service.records import Checkpoint, Model
from rookery.service.request_context import Body, JsonRoute, RequestContext, Tenant, digest_of
from rookery.service.requests import (
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    GetInfo,
    LoadWeights,
    OptimStepRequest,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    SetTtl,
    WeightsInfo,
)
from rookery.service.trainer_calls import ADAPTER
from rookery.service.wire import LARGE_BYTES, CheckLoss, RecordCall, as_json, inflate, parse_json
from rookery.service.work import Refusal, bad, missing
from rookery.types import Json

__all__ = ["make_checkpoint_router", "make_training_router"]


def make_training_router(api: RequestContext) -> APIRouter:
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
        """Check that the trainer has a loss with these options."""
        api.service.admission.check_rate(tenant)
        await _check_loss(api, body.loss, body.options)
        return Response(status_code=204)

    @router.post("/create_custom_loss")
    async def create_custom_loss(body: CreateCustomLoss, tenant: Tenant) -> dict[str, Any]:
        """Create a custom loss from a graph of tensor operations that the trainer runs."""
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
        """Compute gradients (none with forward_only) of a model on data: protobuf or JSON."""
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


URL_S = 3600
"""Lifetime of a download link, in seconds."""
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_ITEM = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def make_checkpoint_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=JsonRoute)
    _add_lists(router, api)
    _add_changes(router, api)
    _add_downloads(router, api, Links(api))
    sequences = APIRouter(prefix="/api/v1", tags=["sequences"], route_class=JsonRoute)
    _add_sequences(sequences, api)
    whole = APIRouter()
    for part in (router, sequences):
        whole.include_router(part)
    return whole


def _add_lists(router: APIRouter, api: RequestContext) -> None:
    @router.get("/training_runs")
    async def runs(tenant: Tenant, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        models = [model for model in api.state.models.values() if model.tenant == tenant]
        models.sort(key=lambda model: model.last_request, reverse=True)
        page = models[max(offset, 0) :][: max(limit, 0)]
        last = _last_checkpoints(api, tenant)
        rows = [_run_row(model, last) for model in page]
        return {"training_runs": rows, "cursor": _cursor(offset, limit, len(models))}

    @router.get("/training_runs/{run_id}")
    async def run(run_id: str, tenant: Tenant) -> dict[str, Any]:
        return _run_row(api.state.run(tenant, run_id), _last_checkpoints(api, tenant))

    @router.get("/training_runs/{run_id}/checkpoints")
    async def run_checkpoints(run_id: str, tenant: Tenant) -> dict[str, Any]:
        api.state.run(tenant, run_id)
        checkpoints = api.state.own_checkpoints(tenant, now=api.now())
        return {"checkpoints": [_row(one) for one in checkpoints if one.model_id == run_id]}

    @router.get("/checkpoints")
    async def checkpoints(tenant: Tenant, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        checkpoints = api.state.own_checkpoints(tenant, now=api.now())
        page = checkpoints[max(offset, 0) :][: max(limit, 0)]
        rows = [_row(one) for one in page]
        return {"checkpoints": rows, "cursor": _cursor(offset, limit, len(checkpoints))}


def _add_changes(router: APIRouter, api: RequestContext) -> None:
    change = api.service.change

    def add(method: str, path: str, command: str) -> None:
        async def endpoint(run_id: str, kind: str, name: str, tenant: Tenant) -> Response:
            await change(command, tenant, CheckpointPath(path=_path(run_id, kind, name)))
            return Response(status_code=204)

        name = command.removesuffix("_checkpoint")
        router.add_api_route(path, endpoint, methods=[method], name=name, status_code=204)

    add("DELETE", _ITEM, "delete_checkpoint")
    add("POST", f"{_ITEM}/publish", "publish_checkpoint")
    add("DELETE", f"{_ITEM}/publish", "unpublish_checkpoint")

    @router.put(f"{_ITEM}/ttl", status_code=204)
    async def set_ttl(run_id: str, kind: str, name: str, body: SetTtl, tenant: Tenant) -> Response:
        expires = None if body.ttl_seconds is None else api.now() + body.ttl_seconds
        ttl = CheckpointTtl(path=_path(run_id, kind, name), expires=expires)
        await change("set_checkpoint_ttl", tenant, ttl)
        return Response(status_code=204)


def _add_downloads(router: APIRouter, api: RequestContext, links: "Links") -> None:
    def find(tenant: str, run_id: str, kind: str, name: str) -> Checkpoint:
        return api.state.checkpoint(tenant, _path(run_id, kind, name), now=api.now())

    def linked(token: str) -> Path:
        try:
            return api.service.context.wal.run.blobs.path(links.blob(token)) / ADAPTER
        except RunError as error:
            raise Refusal(404, "The checkpoint of this link was deleted.") from error

    @router.get(f"{_ITEM}/external_weights_urls")
    async def urls(
        run_id: str, kind: str, name: str, request: Request, tenant: Tenant
    ) -> dict[str, Any]:
        checkpoint = find(tenant, run_id, kind, name)
        folder = api.service.context.wal.run.blobs.path(checkpoint.blob) / ADAPTER
        expires = int(time.time()) + URL_S
        signed = {
            file: str(request.url_for("download", token=links.sign(checkpoint.blob, expires)))
            + f"/{file}"
            for file in sorted(_files(folder))
        }
        return {"urls": signed, "expires": _iso(expires)}

    @router.get(f"{_ITEM}/archive")
    async def archive(
        run_id: str, kind: str, name: str, request: Request, tenant: Tenant
    ) -> Response:
        """SDKs up to 0.35 request a tar this way."""
        checkpoint = find(tenant, run_id, kind, name)
        expires = int(time.time()) + URL_S
        token = links.sign(checkpoint.blob, expires)
        url = str(request.url_for("download_archive", token=token))
        return RedirectResponse(url, status_code=302, headers={"expires": _iso(expires)})

    @router.get("/download/{token}/archive.tar", name="download_archive")
    async def download_archive(token: str) -> Response:
        folder = linked(token)
        scratch = await asyncio.to_thread(_archive, folder)
        return FileResponse(
            scratch, filename="adapter.tar", background=BackgroundTask(scratch.unlink)
        )

    @router.get("/download/{token}", name="download", include_in_schema=False)
    async def download(token: str) -> Response:
        raise missing("file of", token)

    @router.get("/download/{token}/{file:path}")
    async def download_file(token: str, file: str) -> Response:
        path = _files(linked(token)).get(file)
        if path is None:
            raise missing("file", file)
        return FileResponse(path)


class Links:
    """Signed download links to a blob, valid for a while without a key: `DIGEST-EXPIRES-SIGN`."""

    def __init__(self, api: RequestContext) -> None:
        self._api = api

    def sign(self, blob: str, expires: int) -> str:
        return f"{blob}-{expires}-{self._signature(blob, str(expires))}"

    def blob(self, token: str) -> str:
        """Return the digest of a valid link."""
        parts = token.split("-")
        is_real = len(parts) == 3 and hmac.compare_digest(
            parts[2].encode(), self._signature(parts[0], parts[1]).encode()
        )
        if not is_real or int(parts[1]) < time.time():  # signed, so it is a number
            raise Refusal(404, "This download link has expired: ask for a new one.")
        return parts[0]

    def _signature(self, blob: str, expires: str) -> str:
        secret = self._api.service.link_secret
        return hmac.new(secret, f"{blob}-{expires}".encode(), hashlib.sha256).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """Return all files by name: names from clients never reach the disk."""
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def _archive(folder: Path) -> Path:
    """Write a tar of the folder to a new file, which the caller removes."""
    handle, name = tempfile.mkstemp(suffix=".tar")
    os.close(handle)
    try:
        write_archive(folder, Path(name))
    except OSError as error:
        Path(name).unlink()
        raise Refusal(503, f"The archive cannot be written: {error}.") from error
    return Path(name)


def _path(run_id: str, kind: str, name: str) -> str:
    if kind not in _TYPES:
        raise bad(f"{kind!r:.60} is not a kind of checkpoint: {', '.join(_TYPES)}.")
    return f"tinker://{run_id}/{kind}/{name}"


def _last_checkpoints(api: RequestContext, tenant: str) -> dict[tuple[str, str], Checkpoint]:
    """Return the newest checkpoint of every model and kind."""
    newest_first = api.state.own_checkpoints(tenant, now=api.now())
    return {(one.model_id, one.kind): one for one in reversed(newest_first)}


def _run_row(model: Model, newest: Mapping[tuple[str, str], Checkpoint]) -> dict[str, Any]:
    last = newest.get((model.id, "weights"))
    last_sampler = newest.get((model.id, "sampler_weights"))
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.tenant,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "corrupted": bool(model.failure),
        "last_request_time": _iso(model.last_request),
        "last_checkpoint": None if last is None else _row(last),
        "last_sampler_checkpoint": None if last_sampler is None else _row(last_sampler),
        "user_metadata": model.metadata,
    }


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _iso(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _iso(checkpoint.expires),
    }


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


def _add_sequences(router: APIRouter, api: RequestContext) -> None:
    @router.get("/sequences")
    async def sequences(tenant: Tenant, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        stored = list(api.state.sequences.get(tenant, {}).values())
        page = stored[max(offset, 0) :][: max(limit, 0)]
        rows = [{"id": one.id, "model": one.model, "created": one.created} for one in page]
        return {"sequences": rows, "total_count": len(stored)}

    @router.get("/sequences/{sequence_id}")
    async def sequence(sequence_id: str, tenant: Tenant) -> dict[str, Any]:
        """Return the turn, with its arrays for forward_backward in `datum`."""
        stored = api.state.sequence(tenant, sequence_id)
        return {**asdict(stored), "datum": stored.datum()}

    @router.delete("/sequences/{sequence_id}", status_code=204)
    async def remove(sequence_id: str, tenant: Tenant) -> Response:
        await api.service.change("remove_sequence", tenant, SequenceId(id=sequence_id))
        return Response(status_code=204)
