"""The web application: error answers, routes for clients without an SDK, pages for the operator.

app = make_app(service, keys=Keys(path), routes=ROUTES, before=fill_gap)
"""

import base64
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from rookery.reports import QueueStatus, ServiceStatus, TenantStatus
from rookery.runtime.app_shell import ErrorAnswers
from rookery.runtime.app_shell import make_app as make_shell
from rookery.runtime.concurrency import run_in_thread, together
from rookery.seeding import stream_seed
from rookery.service.commands import AdapterId, NewAdapter
from rookery.service.drawing import Drawn, encode_prompts
from rookery.service.keys import Keys
from rookery.service.records import JsonRows
from rookery.service.request_context import (
    DrawingRoute,
    JsonRoute,
    RequestContext,
    Tenant,
    find_source,
    write_answer,
)
from rookery.service.requests import DrawOptions, PromptPieces
from rookery.service.service import Service, new_id
from rookery.service.trainer_calls import ADAPTER
from rookery.service.wire import IN_SLICES
from rookery.service.work import DrawWork, Refusal, bad, missing, status_of
from rookery.types import LoraShape, TokenIds

__all__ = [
    "AdapterName",
    "AdapterUpload",
    "make_app",
    "make_router",
    "read_shape",
    "read_status",
    "register_adapter",
]


# The shape of an adapter from its adapter_config.json, without its weights.


ATTENTION, MLP, UNEMBED = "attn", "mlp", "unembed"
_GROUPS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ATTENTION),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MLP),
    "lm_head": UNEMBED,
}


def read_shape(config: bytes) -> LoraShape:
    """Return rank and layer kinds, as a client would request them."""
    try:
        document = json.loads(config)
        ranks = [document["r"], *(document.get("rank_pattern") or {}).values()]
        is_fine = all(isinstance(rank, int) and rank > 0 for rank in ranks)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise bad(f"adapter_config is no PEFT config of a LoRA: {error!r:.200}.") from error
    if not is_fine:
        raise bad(f"adapter_config has the ranks {ranks!r:.100}; they are whole numbers above 0.")
    groups = _groups(document)
    return LoraShape(
        rank=max(ranks),
        seed=0,
        train_attn=ATTENTION in groups,
        train_mlp=MLP in groups,
        train_unembed=UNEMBED in groups,
    )


def _groups(document: Mapping[str, Any]) -> set[str]:
    """Return the kinds of layers it adapts; a pattern of names counts as attention and MLP."""
    targets = document.get("target_modules")
    if not isinstance(targets, list) or not targets:
        return {ATTENTION, MLP}
    ends = {str(target).rpartition(".")[2] for target in targets}
    return {_GROUPS[end] for end in ends if end in _GROUPS} or {ATTENTION, MLP}


FILES = ("adapter_config.json", "adapter_model.safetensors")


AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$")]


class PlainOptions(DrawOptions):
    """Sampling options; the SDK cannot send min_p and penalties."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=16, ge=1)


class PlainSample(BaseModel):
    """Prompts as texts or tokens, and the model that continues them."""

    model_config = ConfigDict(protected_namespaces=())

    prompts: Annotated[list[str | Annotated[list[int], IN_SLICES]], IN_SLICES] = []
    prompt: PromptPieces | None = None
    model_id: str | None = None
    """A registered adapter, a tinker:// path or a base model; by default the first base model."""
    adapter_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int | None = Field(default=None, ge=1)
    prompt_logprobs: bool = False
    sampling_params: PlainOptions = PlainOptions()


class AdapterUpload(BaseModel):
    """A PEFT folder: a path on the server under a folder the operator lists, or its two files."""

    adapter_id: AdapterName
    lora_path: str | None = None
    adapter_config: dict[str, Any] | None = None
    adapter_model: str | None = None
    """The safetensors file in base64."""
    base_model: str | None = None
    session_id: str = ""
    """Session with which it ends; if empty, it stays until it is removed."""


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["plain"], route_class=JsonRoute)
    router.include_router(_sample_router(api))

    @router.post("/adapters", status_code=201)
    async def register(body: AdapterUpload, tenant: Tenant) -> dict[str, Any]:
        return await register_adapter(api, tenant, body)

    @router.get("/adapters")
    async def adapters(tenant: Tenant) -> list[dict[str, str]]:
        return [one.document() for one in api.state.adapters.values() if one.tenant == tenant]

    @router.delete("/adapters/{adapter_id}", status_code=204)
    async def unregister(adapter_id: str, tenant: Tenant) -> Response:
        await api.service.change("remove_adapter", tenant, AdapterId(adapter_id=adapter_id))
        return Response(status_code=204)

    return router


def _sample_router(api: RequestContext) -> APIRouter:
    router = APIRouter(route_class=DrawingRoute)

    @router.post("/sample")
    async def sample(body: PlainSample, tenant: Tenant) -> Response:
        """Return `n` completions of every prompt, in order, as texts and as tokens."""
        api.service.admission.check_rate(tenant)
        name = body.model_id or body.adapter_id or body.model_path or body.base_model
        source = find_source(api, tenant, name)
        codec = api.service.context.backend(source.base_model).codec
        num_given = len(body.prompts) + (body.prompt is not None)
        num_samples = body.num_samples or body.sampling_params.n
        api.service.admission.check_samples(num_given * num_samples)
        texts = [one if isinstance(one, str) else tuple(one) for one in body.prompts]
        prompts = await api.service.reading.in_thread(
            tenant, lambda: encode_prompts(codec, texts), tokens=sum(map(len, texts))
        )
        if body.prompt is not None:
            prompts.append(body.prompt.token_ids())
        if not prompts or not all(prompts):
            raise bad("Give prompts: a list of texts, or of lists of tokens, none of them empty.")
        draws = [
            _draw(api, tenant, (source.base_model, source.blob), prompt, (body, place))
            for place, prompt in enumerate(prompts)
        ]
        api.service.check_draws(tenant, num=len(draws))
        answers = await together(api.service.drawing.draw(draw) for draw in draws)
        return await write_answer(api, tenant, lambda: _answer(answers))

    return router


async def register_adapter(api: RequestContext, tenant: str, body: AdapterUpload) -> dict[str, Any]:
    """Store an adapter, check that it fits, and serve it under its name; return its document."""
    api.service.admission.check_rate(tenant)
    api.service.admission.check_checkpoints(tenant)
    if body.session_id:
        api.state.session(tenant, body.session_id)
    base_model = body.base_model or next(iter(api.service.context.backends))
    backend = api.service.context.backend(base_model)
    blobs = api.service.context.wal.run.blobs
    turn = api.service.uploads.take(tenant, tokens=1, width=1, id=new_id("upload"))
    async with turn, api.service.blob_lock:
        blob, size_bytes, shape = await run_in_thread(_store, api, body)
        # Loaded once to check that it fits; samples load it again when they need it.
        ref = await backend.folders.load(blobs.path(blob) / ADAPTER, name=f"check-{blob[:16]}")
        await backend.folders.unload(ref)
        adapter = NewAdapter(
            adapter_id=body.adapter_id,
            base_model=base_model,
            blob=blob,
            size_bytes=size_bytes,
            lora_path=body.lora_path or "upload",
            session_id=body.session_id,
            **asdict(shape),
        )
        return await api.service.change("register_adapter", tenant, adapter)


def _draw(
    api: RequestContext,
    tenant: str,
    model: tuple[str, str],
    prompt: TokenIds,
    asked: tuple[PlainSample, int],
) -> DrawWork:
    body, place = asked
    options = body.sampling_params
    request_id = new_id("plain")
    max_tokens = api.service.drawing.max_tokens(
        model[0], asked=options.max_tokens, num_prompt=len(prompt)
    )
    seed = stream_seed(0, request_id) if options.seed is None else stream_seed(options.seed, place)
    params = options.params(max_tokens=max_tokens, seed=seed, n=body.num_samples or options.n)
    return DrawWork(
        id=request_id,
        tenant=tenant,
        base_model=model[0],
        blob=model[1],
        prompt=prompt,
        params=params,
        scored=len(prompt) if body.prompt_logprobs else 0,
    )


def _answer(answers: list[Drawn]) -> dict[str, Any]:
    completions = [one for completions, _ in answers for one in completions]
    scores = [None if s.logprobs is None else list(s.logprobs) for _, s in answers]
    has_scores = any(row is not None for row in scores)
    return {
        "sequences": JsonRows(
            [(one.finish_reason, one.tokens, one.logprobs) for one in completions],
            lambda row: dict(zip(("stop_reason", "tokens", "logprobs"), row, strict=True)),
        ),
        "completions": [one.text for one in completions],
        "prompt_logprobs": scores if has_scores else None,
    }


def _store(api: RequestContext, body: AdapterUpload) -> tuple[str, int, LoraShape]:
    """Store the files; return their digest, size and adapter shape. Blocks on the disk."""
    if (body.lora_path is None) == (body.adapter_model is None):
        raise bad("Give lora_path, or adapter_config and adapter_model, and not both.")
    files = _read_path(api, body.lora_path) if body.lora_path else _read_upload(body)
    shape = read_shape(files[FILES[0]])
    blobs = api.service.context.wal.run.blobs
    with blobs.stage() as staged:
        (staged / ADAPTER).mkdir()
        for name, data in files.items():
            (staged / ADAPTER / name).write_bytes(data)
        return blobs.put_folder(staged), sum(map(len, files.values())), shape


def _read_path(api: RequestContext, lora_path: str) -> dict[str, bytes]:
    if "\0" in lora_path:
        raise bad("lora_path holds a null character: no path does.")
    folder = Path(lora_path).resolve()
    allowed = api.service.context.config.adapter_folders
    if not any(folder.is_relative_to(root.resolve()) for root in allowed):
        roots = ", ".join(map(str, allowed)) or "none"
        raise bad(
            f"Adapters may be read from the folders that the operator lists ({roots}): upload the "
            "files as adapter_config and adapter_model, or ask for adapter_folders to be set."
        )
    try:
        if not folder.exists():
            raise bad(f"LoRA path does not exist: {lora_path}")
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise bad(
                f"{lora_path} has no {missing[0]}: save the adapter with PEFT's save_pretrained."
            )
        return {name: (folder / name).read_bytes() for name in FILES}
    except OSError as error:  # a name too long, or unreadable
        raise bad(f"{lora_path!r:.300} cannot be read: {error.strerror}.") from error


def _read_upload(body: AdapterUpload) -> dict[str, bytes]:
    if body.adapter_config is None or body.adapter_model is None:
        raise Refusal(422, "An upload has adapter_config (JSON) and adapter_model (base64).")
    try:
        weights = base64.b64decode(body.adapter_model, validate=True)
    except ValueError as error:  # for letters beyond ASCII it is no binascii.Error
        raise bad(f"adapter_model is not base64: {error}.") from error
    config = json.dumps(body.adapter_config).encode()
    return dict(zip(FILES, (config, weights), strict=True))


def read_status(service: Service) -> ServiceStatus:
    """Return the current status. The cost grows with the tenants' records."""
    context, training, drawing = service.context, service.training, service.drawing
    live = Counter(model.tenant for model in context.state.models.values() if model.is_live)
    saved = Counter(checkpoint.tenant for checkpoint in context.state.checkpoints.values())
    tokens = context.metrics.tokens_by_tenant()
    names = sorted({*live, *saved, *tokens, *(s.tenant for s in context.state.sessions.values())})
    return ServiceStatus(
        models=tuple(context.backends),
        queues=(
            QueueStatus(
                name="training",
                num_waiting=training.num_waiting,
                tokens_waiting=training.tokens_waiting,
                tokens_per_s=training.throughput.per_s,
            ),
            QueueStatus(
                name="sampling",
                num_waiting=drawing.turns.num_waiting,
                tokens_waiting=drawing.turns.tokens_waiting,
                tokens_per_s=drawing.throughput.per_s,
            ),
        ),
        tenants=tuple(
            TenantStatus(
                name=name,
                num_pending=context.pending.count(name),
                num_models=live[name],
                num_checkpoints=saved[name],
                tokens=tokens.get(name, {}),
            )
            for name in names
        ),
        journal_bytes=context.wal.num_bytes,
    )


INDEX = {
    "/openapi.json": "all routes, and what they take",
    "/v1/models": "the models, for OpenAI clients",
    "/api/v1/healthz": "whether it answers",
    "/status": "queues and tenants, to this machine alone",
    "/metrics": "numbers for Prometheus",
}


def make_app(
    service: Service,
    *,
    keys: Keys | None,
    routes: Iterable[Callable[[RequestContext], APIRouter]],
    before: Callable[[Request, int, str], Awaitable[None]],
    render: Callable[[ServiceStatus], str] | None = None,
) -> FastAPI:
    """Make the application over a running service. Without keys, all clients are one tenant.
    `routes` make the routes of clients, `before` is called before an error answer, `render` makes
    the status page. That page and the per-tenant metrics name all tenants, so they are shown only
    to this machine."""
    api, metrics = RequestContext(service, keys), service.context.metrics

    def note(path: str, status: int, seconds: float) -> None:
        metrics.requests.labels(path, status).inc()
        metrics.seconds.labels(path).observe(seconds)

    app = make_shell(
        "Rookery",
        summary="Sampling and training over HTTP, by the protocol of the tinker SDK.",
        answers=ErrorAnswers(
            status=status_of,
            sentence=service.context.sentence,
            document=lambda _, text: {"error": text, "detail": text, "category": "user"},
            before=before,
        ),
        limit_bytes=api.body_bytes,
        note=note,
    )
    app.state.api = api
    app.state.reading = service.reading
    for make_router in routes:
        app.include_router(make_router(api))
    _add_pages(app, service, render)
    return app


def _add_pages(
    app: FastAPI, service: Service, render: Callable[[ServiceStatus], str] | None
) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> dict[str, Any]:
        """Name, version and main routes."""
        return {"name": "rookery", "version": app.version, "routes": INDEX}

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> PlainTextResponse:
        """Metrics for Prometheus; per-tenant metrics only for this machine."""
        service.show_queues()
        text = service.context.metrics.text(has_tenants=_is_local(request))
        return PlainTextResponse(text)

    @app.get("/status", include_in_schema=False, response_model=None)
    async def status(request: Request, format: Literal["html", "json"] = "html") -> Response:
        """Queues and tenants, for this machine only: a page, or `?format=json`."""
        if render is None or not _is_local(request):
            raise missing("page", "/status")
        report = read_status(service)
        return JSONResponse(asdict(report)) if format == "json" else HTMLResponse(render(report))


def _is_local(request: Request) -> bool:
    """True if a program on this machine sent the request directly."""
    host = request.client.host if request.client is not None else ""
    return host in ("127.0.0.1", "::1") and "x-forwarded-for" not in request.headers
