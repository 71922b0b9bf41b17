"""Routes of a vLLM server besides `/v1` that its clients use: health, tokens, adapters.

A vLLM client may be pointed at the service. An adapter that it registers is served under its name,
also to other programs of its tenant.
"""

from importlib.metadata import version as version_of

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from rookery.compat.openai.routes import MOST_MESSAGES, ChatMessage, read_chat
from rookery.service.app import AdapterName, AdapterUpload, register_adapter
from rookery.service.commands import AdapterId
from rookery.service.request_context import (
    JsonRoute,
    RequestContext,
    Tenant,
    find_source,
    write_answer,
)
from rookery.service.wire import Tokens
from rookery.service.work import bad
from rookery.types import TokenIds

__all__ = ["make_router"]


class TokenizeRequest(BaseModel):
    """A text or a chat to tokenize."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default=[], max_length=MOST_MESSAGES)


class DetokenizeRequest(BaseModel):
    """Tokens to decode."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: Tokens


class LoadLora(BaseModel):
    """Loads a PEFT folder on the service's machine, under a folder that the operator lists."""

    model_config = ConfigDict(extra="ignore")

    lora_name: AdapterName
    lora_path: str


class LoraName(BaseModel):
    """Names an adapter."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)
    _add_facts(router)
    _add_tokens(router, api)

    @router.post("/v1/load_lora_adapter")
    async def load_lora(body: LoadLora, tenant: Tenant) -> PlainTextResponse:
        upload = AdapterUpload(adapter_id=body.lora_name, lora_path=body.lora_path)
        await register_adapter(api, tenant, upload)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora(body: LoraName, tenant: Tenant) -> PlainTextResponse:
        adapter = AdapterId(adapter_id=body.lora_name)
        await api.service.change("remove_adapter", tenant, adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _add_facts(router: APIRouter) -> None:
    @router.get("/health")
    async def health() -> Response:
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": version_of("rookery"), "server": "rookery"}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(_: Tenant) -> Response:
        """Does nothing: every version of weights has its own prefixes."""
        return Response()


def _add_tokens(router: APIRouter, api: RequestContext) -> None:
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request, tenant: Tenant) -> Response:
        backend = api.service.context.backend(find_source(api, tenant, body.model).base_model)
        if (body.prompt is None) == (not body.messages):
            raise bad("Give a prompt or messages, and not both.")
        text, codec = body.prompt, backend.codec

        def encode() -> TokenIds:
            chat = tuple(one.message for one in body.messages)
            return codec.encode_chat(chat) if text is None else codec.encode(text)

        tokens = await read_chat(api, tenant, request, encode)
        context_tokens = backend.engine.context_tokens
        document = {"tokens": tokens, "count": len(tokens), "max_model_len": context_tokens}
        return await write_answer(api, tenant, lambda: document)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, tenant: Tenant) -> Response:
        backend = api.service.context.backend(find_source(api, tenant, body.model).base_model)
        text = await api.service.reading.in_thread(
            tenant, lambda: backend.codec.decode(body.tokens), tokens=len(body.tokens)
        )
        return await write_answer(api, tenant, lambda: {"prompt": text})
