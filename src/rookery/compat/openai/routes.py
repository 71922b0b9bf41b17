"""`/v1` for OpenAI clients: completions and chats of base models, adapters and checkpoints.

Answers carry token ids besides texts (`prompt_token_ids`, `token_ids`), for training on them. With
`stream` they are sent while they are drawn: see `stream.py`.
"""

import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import add
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rookery.compat.openai.stream import (
    Answers,
    CallReader,
    ChunkForm,
    DrawStream,
    EventStream,
    NamedTool,
    Tell,
    Tool,
    ToolChoice,
    chat_logprobs,
    forced_schema,
    read_object,
    text_logprobs,
    usage_of,
)
from rookery.errors import TaskError
from rookery.ports import Codec
from rookery.runtime.concurrency import together
from rookery.seeding import stream_seed
from rookery.service.commands import StoreSequence
from rookery.service.drawing import encode_prompts
from rookery.service.records import JsonRows
from rookery.service.request_context import (
    DrawingRoute,
    RequestContext,
    Tenant,
    find_source,
    model_names,
    write_answer,
)
from rookery.service.requests import MAX_COUNT, TokenOptions
from rookery.service.service import new_id
from rookery.service.wire import IN_SLICES
from rookery.service.work import DrawWork, bad
from rookery.types import Completion, CompletionDelta, Json, Message, TokenIds

__all__ = [
    "MOST_MESSAGES",
    "ChatRequest",
    "CompletionRequest",
    "chat_choice",
    "make_router",
    "read_chat",
    "read_prompts",
    "response_of",
    "text_choice",
]

Answer = TypeVar("Answer")
MAX_TOP = 20
MOST_MESSAGES = 4096
MOST_TOOLS = 256
UNSERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (),
    "functions": (),
    "logit_bias": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": (),
}
"""Options of OpenAI and vLLM that some route lacks, each with values that have no effect."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Options(TokenOptions):
    """Options of both kinds of requests."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, body: Any) -> Any:
        """Refuse unsupported options that would change the answer."""
        if isinstance(body, dict):
            for name in sorted((UNSERVED.keys() - cls.model_fields.keys()) & body.keys()):
                if body[name] not in (None, False, [], {}, *UNSERVED[name]):
                    raise ValueError(f"{name} is not supported: leave it out")
        return body

    @property
    def has_usage(self) -> bool:
        """True if the last chunk of a stream reports the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Options):
    """Prompts as texts or tokens."""

    prompt: (
        str
        | Annotated[list[str], IN_SLICES]
        | Annotated[list[int], IN_SLICES]
        | Annotated[list[Annotated[list[int], IN_SLICES]], IN_SLICES]
    )
    max_tokens: int | None = Field(default=16, ge=1, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str = ""
    """A JSON object as text."""

    @model_validator(mode="after")
    def _check(self) -> "CalledFunction":
        if not isinstance(read_object(self.arguments or "{}"), dict):
            raise ValueError("arguments must be a JSON object, as text")
        return self


class ToolCall(BaseModel):
    """An earlier call of the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def field(self) -> Json:
        """The call for chat templates, with its arguments as an object."""
        arguments = read_object(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    """One turn."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        return self

    @property
    def message(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        calls: Json = [call.field for call in self.tool_calls or ()]
        fields: dict[str, Json] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        given_fields = {name: value for name, value in fields.items() if value is not None}
        return Message(role=self.role, content=text, fields=given_fields)


class JsonSchema(BaseModel):
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(BaseModel):
    """Format of the answers, if the engine supports it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_object(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        return self.json_schema.schema_ if self.json_schema else {"type": "object"}


class ChatRequest(_Options):
    """A chat to be continued."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    store: bool = False
    """Keep the answers under their `sequence_id`, for training: /api/v1/sequences."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    tools: list[Tool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice = "auto"
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r:.200}, which is no tool")
        if choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        return self

    @property
    def json_schema(self) -> str:
        """JSON schema that the answer must match; empty for any text."""
        schema = forced_schema(self.tools or (), self.tool_choice)
        if schema is None and self.response_format is not None:
            schema = self.response_format.schema_object
        return "" if schema is None else json.dumps(schema)

    @property
    def offered(self) -> Sequence[Tool]:
        """Tools that the model is told about."""
        return () if self.tool_choice == "none" else self.tools or ()

    def read_calls(self) -> CallReader | None:
        """Return a reader of tool calls for one answer; None without tools."""
        return CallReader(self.offered, self.tool_choice) if self.offered else None

    def encode(self, codec: Codec) -> TokenIds:
        """Encode the chat as tokens. A long one takes seconds: never in the event loop."""
        messages = tuple(one.message for one in self.messages)
        tools = [tool.model_dump(exclude_unset=True) for tool in self.offered]  # as they were sent
        return codec.encode_chat(messages, tools=tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Prompts of a request, and how to draw each."""

    prompts: list[TokenIds]
    max_tokens: int | None
    top_logprobs: int
    json_schema: str = ""


def make_router(api: RequestContext) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=DrawingRoute)

    @router.get("/models")
    async def models(tenant: Tenant) -> dict[str, Any]:
        rows = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rookery"}
            for name in model_names(api, tenant)
        ]
        return {"object": "list", "data": rows}

    _add_completions(router, api)
    _add_chats(router, api)
    return router


def _add_completions(router: APIRouter, api: RequestContext) -> None:
    @router.post("/completions")
    async def completions(body: CompletionRequest, tenant: Tenant) -> Response:
        api.service.admission.check_rate(tenant)
        codec = _codec(api, tenant, body)
        api.service.admission.check_samples(num_prompts(body) * body.n)
        texts = read_prompts(body)
        prompts = await api.service.reading.in_thread(
            tenant, lambda: encode_prompts(codec, texts), tokens=sum(map(len, texts))
        )
        api.service.check_draws(tenant, num=len(prompts))
        top = body.logprobs or 0
        order = _Order(prompts=prompts, max_tokens=body.max_tokens, top_logprobs=top)
        draw = partial(_draw, api, tenant, body, order)
        has_logprobs = body.logprobs is not None
        if body.stream:
            form = ChunkForm(
                kind="text_completion",
                model=body.model,
                codec=codec,
                prompts=prompts,
                n=body.n,
                has_logprobs=has_logprobs,
                has_usage=body.has_usage,
            )
            return await _stream(api, draw, form)
        answers = await draw(None)

        choice = partial(text_choice, codec, has_logprobs=has_logprobs)
        document = response_of("text_completion", body.model, (prompts, answers), choice)
        return await write_answer(api, tenant, lambda: document)


def _add_chats(router: APIRouter, api: RequestContext) -> None:
    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request, tenant: Tenant) -> Response:
        api.service.admission.check_rate(tenant)
        api.service.admission.check_samples(body.n)
        codec = _codec(api, tenant, body)
        prompt, json_schema = await read_chat(
            api, tenant, request, lambda: (body.encode(codec), body.json_schema)
        )
        api.service.check_draws(tenant, num=1)
        order = _Order(
            prompts=[prompt],
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
            json_schema=json_schema,
        )
        draw = partial(_draw, api, tenant, body, order)
        store = partial(_store, api, tenant, (body.model, prompt)) if body.store else None
        if body.stream:
            form = ChunkForm(
                kind="chat.completion.chunk",
                model=body.model,
                codec=codec,
                prompts=[prompt],
                n=body.n,
                has_logprobs=body.logprobs,
                has_usage=body.has_usage,
                read_calls=body.read_calls,
                store=store,
            )
            return await _stream(api, draw, form)
        answers = await draw(None)
        stored = [{"sequence_id": await store(one)} for one in answers[0]] if store else []
        choice = partial(chat_choice, codec, body)
        document = response_of("chat.completion", body.model, ([prompt], answers), choice, stored)
        return await write_answer(api, tenant, lambda: document)


def _codec(api: RequestContext, tenant: str, body: _Options) -> Codec:
    source = find_source(api, tenant, body.model)
    return api.service.context.backend(source.base_model).codec


async def read_chat(
    api: RequestContext, tenant: str, request: Request, read: Callable[[], Answer]
) -> Answer:
    """Read a body in turn with other tenants, as its whole content goes through the template."""
    num_bytes = len(await request.body())
    try:
        return await api.service.reading.in_thread(tenant, read, tokens=num_bytes)
    except TaskError as error:
        raise bad(str(error)) from error


async def _stream(
    api: RequestContext, draw: Callable[[Tell], Coroutine[Any, Any, Answers]], form: ChunkForm
) -> Response:
    stream = DrawStream(draw, form=form, sentence=api.service.context.sentence)
    await stream.begin()
    return EventStream(stream)


def num_prompts(body: CompletionRequest) -> int:
    """Count the prompts; a text or a list of tokens is one."""
    is_one = isinstance(body.prompt, str) or not body.prompt or isinstance(body.prompt[0], int)
    return 1 if is_one else len(body.prompt)


def read_prompts(body: CompletionRequest) -> list[str | TokenIds]:
    """Return texts or tokens, at least one."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):  # then all are
        return [tuple(prompt)]
    prompts = [one if isinstance(one, str) else tuple(one) for one in prompt if one != 0]  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise bad("prompt is empty: give a text, tokens, or a list of them.")
    return prompts


async def _draw(
    api: RequestContext, tenant: str, body: _Options, order: _Order, tell: Tell | None
) -> Answers:
    """Draw the answers to each prompt; `tell` gets new tokens meanwhile."""
    places = range(len(order.prompts))
    tells = [None if tell is None else partial(tell, place) for place in places]
    return await together(
        _complete(api, tenant, body, order, place, tells[place]) for place in places
    )


async def _complete(
    api: RequestContext,
    tenant: str,
    body: _Options,
    order: _Order,
    place: int,
    on_delta: Callable[[CompletionDelta], None] | None,
) -> tuple[Completion, ...]:
    """Draw the answers to the prompt at `place`."""
    source = find_source(api, tenant, body.model)
    request_id, prompt = new_id("cmpl"), order.prompts[place]
    drawing = api.service.drawing
    limit = drawing.max_tokens(source.base_model, asked=order.max_tokens, num_prompt=len(prompt))
    seed = stream_seed(0, request_id) if body.seed is None else stream_seed(body.seed, place)
    draw = DrawWork(
        id=request_id,
        tenant=tenant,
        base_model=source.base_model,
        blob=source.blob,
        prompt=prompt,
        params=body.params(max_tokens=limit, seed=seed, top_logprobs=order.top_logprobs),
        json_schema=order.json_schema,
        on_delta=on_delta,
    )
    completions, _ = await drawing.draw(draw)
    return completions


async def _store(
    api: RequestContext, tenant: str, asked: tuple[str, TokenIds], one: Completion
) -> str:
    model, prompt = asked
    sequence = StoreSequence(
        id=new_id("seq"),
        model=model,
        prompt=list(prompt),
        tokens=list(one.tokens),
        logprobs=list(one.logprobs),
    )
    await api.service.change("store_sequence", tenant, sequence)
    return sequence.id


def text_choice(
    codec: Codec, one: Completion, prompt: TokenIds, *, has_logprobs: bool
) -> dict[str, Any]:
    return {
        "text": one.text,
        "finish_reason": one.finish_reason,
        "token_ids": list(one.tokens),
        "prompt_token_ids": list(prompt),
        "logprobs": text_logprobs(one, codec) if has_logprobs else None,
    }


def chat_choice(
    codec: Codec, body: ChatRequest, one: Completion, prompt: TokenIds
) -> dict[str, Any]:
    """Format one answer to a chat, with its tool calls separate from the content."""
    message: dict[str, Any] = {"role": "assistant", "content": one.text}
    reason: str = one.finish_reason
    reader = body.read_calls()
    if reader is not None:
        content, calls = map(add, reader.add(one.text), reader.end())
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
            reason = "tool_calls" if reason == "stop" else reason
    return {
        "message": message,
        "finish_reason": reason,
        "token_ids": list(one.tokens),
        "prompt_token_ids": list(prompt),
        "logprobs": chat_logprobs(one, codec) if body.logprobs else None,
    }


def response_of(
    kind: Literal["text_completion", "chat.completion"],
    model: str,
    drawn: tuple[list[TokenIds], Answers],
    choice: Callable[[Completion, TokenIds], dict[str, Any]],
    more: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    """Build the answer to a request, with its token usage. Choices are JsonRows, made while they
    are written, as each may repeat a long prompt. `more` has extra fields per choice."""
    prompts, answers = drawn
    pairs = [
        (one, prompt) for prompt, completions in zip(*drawn, strict=True) for one in completions
    ]
    rows: list[Any] = list(enumerate(zip_longest(pairs, more, fillvalue={})))
    num_drawn = sum(len(one.tokens) for completions in answers for one in completions)
    return {
        "id": new_id("cmpl"),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": JsonRows(rows, lambda row: {"index": row[0], **choice(*row[1][0]), **row[1][1]}),
        "usage": usage_of(prompts, num_drawn),
    }
