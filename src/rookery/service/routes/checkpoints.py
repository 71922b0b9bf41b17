"""What is kept: training runs and checkpoints, with their downloads, and stored turns of chats."""

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
from starlette.background import BackgroundTask

from rookery.errors import RunError
from rookery.service.commands import CheckpointPath, CheckpointTtl, SequenceId
from rookery.service.config import write_archive
from rookery.service.records import Checkpoint, Model
from rookery.service.routes.json_route import JsonRoute
from rookery.service.routes.request_context import RequestContext, Tenant
from rookery.service.trainer_calls import ADAPTER
from rookery.service.wire.requests import SetTtl
from rookery.service.work import Refusal, bad, missing

__all__ = ["make_router"]

URL_S = 3600
"""How long a download link is good for."""
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_ITEM = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=JsonRoute)
    _add_lists(router, api)
    _add_changes(router, api)
    _add_downloads(router, api, Links(api.service.link_secret))
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
            raise Refusal(404, "What this link is of has been deleted.") from error

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
        """SDKs up to 0.35 ask for a tar this way."""
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
    """Download links that name a blob, good for a while, without a key: `DIGEST-EXPIRES-SIGN`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, blob: str, expires: int) -> str:
        return f"{blob}-{expires}-{self._signature(blob, str(expires))}"

    def blob(self, token: str) -> str:
        """The digest of a link that is still good."""
        parts = token.split("-")
        is_real = len(parts) == 3 and hmac.compare_digest(
            parts[2].encode(), self._signature(parts[0], parts[1]).encode()
        )
        if not is_real or int(parts[1]) < time.time():  # signed: a number
            raise Refusal(404, "This download link is not good any more: ask for a new one.")
        return parts[0]

    def _signature(self, blob: str, expires: str) -> str:
        return hmac.new(self._secret, f"{blob}-{expires}".encode(), hashlib.sha256).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """All files by their names: the disk is never asked for a name that a client sent."""
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def _archive(folder: Path) -> Path:
    """A tar of the folder in a new file, which the caller removes."""
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
    """The newest of every model and kind."""
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
        """The turn, and `datum`: its arrays as forward_backward takes them."""
        stored = api.state.sequence(tenant, sequence_id)
        return {**asdict(stored), "datum": stored.datum()}

    @router.delete("/sequences/{sequence_id}", status_code=204)
    async def remove(sequence_id: str, tenant: Tenant) -> Response:
        await api.service.change("remove_sequence", tenant, SequenceId(id=sequence_id))
        return Response(status_code=204)
