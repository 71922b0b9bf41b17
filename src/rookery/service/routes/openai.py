"""`/v1` for OpenAI clients: completions and chats of base models, adapters and checkpoints.

Answers carry token ids beside the texts (`prompt_token_ids`, `token_ids`), so that what was drawn
can be trained on.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rookery.concurrency import together
from rookery.errors import TaskError
from rookery.ports import Codec
from rookery.seeding import stream_seed
from rookery.service.commands import StoreSequence
from rookery.service.drawing import Draw
from rookery.service.refusals import bad
from rookery.service.routes.drawing_route import DrawingRoute
from rookery.service.routes.gate import Gate, Tenant
from rookery.service.routes.models import find_source, model_names
from rookery.service.service import new_id
from rookery.service.wire.requests import Finite, PenaltyOptions, Stops
from rookery.service.wire.validation import IN_SLICES
from rookery.types import Completion, Message, SamplingParams, TokenIds, TopLogprobs

__all__ = [
    "MAX_COUNT",
    "MOST_MESSAGES",
    "ChatRequest",
    "CompletionRequest",
    "chat_choice",
    "encode_prompts",
    "make_router",
    "num_characters",
    "read_prompts",
    "response_of",
    "text_choice",
]

MAX_COUNT = 2**31 - 1
"""Of tokens: servers hold such numbers in 32 bits."""
MAX_TOP = 20
MOST_MESSAGES = 4096
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
"""Options of OpenAI and vLLM that are not there, each with values that ask for nothing."""


class _Options(PenaltyOptions):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str
    n: int = Field(default=1, ge=1, le=4096)
    temperature: Finite = Field(default=1.0, ge=0)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=MAX_COUNT)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    stop: Stops[str] | str | None = None
    stop_token_ids: Stops[int] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, given: Any) -> Any:
        """What would change the answer, and is not there, is not passed over."""
        if isinstance(given, dict):
            for name in sorted(UNSERVED.keys() & given.keys()):
                if given[name] not in (None, False, [], {}, *UNSERVED[name]):
                    raise ValueError(f"{name} is not there: leave it out")
        return given

    def params(self, *, max_tokens: int, seed: int, top_logprobs: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            penalties=self.penalties,
            stop=stop,
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=seed,
            n=self.n,
            top_logprobs=top_logprobs,
        )


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


class ChatMessage(BaseModel):
    """One turn."""

    role: str
    content: str


class ChatRequest(_Options):
    """A chat to be continued."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    store: bool = False
    """Keep the answers by their `sequence_id`, to train on: /api/v1/sequences."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)


def make_router(gate: Gate) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=DrawingRoute)

    @router.get("/models")
    async def models(tenant: Tenant) -> dict[str, Any]:
        rows = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rookery"}
            for name in model_names(gate, tenant)
        ]
        return {"object": "list", "data": rows}

    _add_completions(router, gate)
    _add_chats(router, gate)
    return router


def _add_completions(router: APIRouter, gate: Gate) -> None:
    @router.post("/completions")
    async def completions(body: CompletionRequest, tenant: Tenant) -> dict[str, Any]:
        gate.service.admission.check_rate(tenant)
        codec = _codec(gate, tenant, body)
        gate.service.admission.check_samples(num_prompts(body) * body.n)
        given = read_prompts(body)
        prompts = await gate.service.reading.in_thread(
            tenant, lambda: encode_prompts(codec, given), tokens=sum(map(len, given))
        )
        gate.service.check_draws(tenant, num=len(prompts))
        works = [
            _complete(gate, tenant, body, prompt, (body.max_tokens, body.logprobs or 0, place))
            for place, prompt in enumerate(prompts)
        ]
        answers = await together(works)
        has_logprobs = body.logprobs is not None
        choices = await asyncio.to_thread(
            lambda: [
                text_choice(one, codec, prompt, has_logprobs=has_logprobs)
                for prompt, drawn in zip(prompts, answers, strict=True)
                for one in drawn
            ]
        )
        return response_of("text_completion", body.model, choices, prompts)


def _add_chats(router: APIRouter, gate: Gate) -> None:
    @router.post("/chat/completions")
    async def chat(body: ChatRequest, tenant: Tenant) -> dict[str, Any]:
        gate.service.admission.check_rate(tenant)
        gate.service.admission.check_samples(body.n)
        codec = _codec(gate, tenant, body)
        messages = tuple(Message(role=m.role, content=m.content) for m in body.messages)
        try:
            prompt = await gate.service.reading.in_thread(
                tenant, lambda: codec.encode_chat(messages), tokens=num_characters(messages)
            )
        except TaskError as error:
            raise bad(str(error)) from error
        gate.service.check_draws(tenant, num=1)
        asked = body.max_completion_tokens or body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else 0
        drawn = await _complete(gate, tenant, body, prompt, (asked, top, 0))
        choices = await asyncio.to_thread(
            lambda: [chat_choice(one, codec, prompt, has_logprobs=body.logprobs) for one in drawn]
        )
        if body.store:
            for one, choice in zip(drawn, choices, strict=True):
                choice["sequence_id"] = await _store(gate, tenant, (body.model, prompt), one)
        return response_of("chat.completion", body.model, choices, [prompt])


def _codec(gate: Gate, tenant: str, body: _Options) -> Codec:
    if body.stream:
        raise bad("Answers are not streamed here: leave stream out.")
    source = find_source(gate, tenant, body.model)
    return gate.service.desk.backend(source.base_model).codec


def num_characters(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


def num_prompts(body: CompletionRequest) -> int:
    """A text or a list of tokens is one."""
    is_one = isinstance(body.prompt, str) or not body.prompt or isinstance(body.prompt[0], int)
    return 1 if is_one else len(body.prompt)


def read_prompts(body: CompletionRequest) -> list[str | TokenIds]:
    """Texts or tokens, at least one."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):  # then all are
        return [tuple(given)]
    prompts = [one if isinstance(one, str) else tuple(one) for one in given if one != 0]  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise bad("prompt is empty: give a text, tokens, or a list of them.")
    return prompts


def encode_prompts(codec: Codec, prompts: Sequence[str | TokenIds]) -> list[TokenIds]:
    """Texts as tokens. A long one takes seconds: not in the event loop."""
    return [codec.encode(one) if isinstance(one, str) else one for one in prompts]


async def _complete(
    gate: Gate,
    tenant: str,
    body: _Options,
    prompt: TokenIds,
    asked: tuple[int | None, int, int],
) -> tuple[Completion, ...]:
    """`asked`: the most tokens, the most likely tokens to report, the place of the prompt."""
    max_tokens, top_logprobs, place = asked
    source = find_source(gate, tenant, body.model)
    request_id = new_id("cmpl")
    drawing = gate.service.drawing
    limit = drawing.max_tokens(source.base_model, asked=max_tokens, num_prompt=len(prompt))
    seed = stream_seed(0, request_id) if body.seed is None else stream_seed(body.seed, place)
    draw = Draw(
        id=request_id,
        tenant=tenant,
        base_model=source.base_model,
        blob=source.blob,
        prompt=prompt,
        params=body.params(max_tokens=limit, seed=seed, top_logprobs=top_logprobs),
    )
    completions, _ = await drawing.draw(draw)
    return completions


async def _store(gate: Gate, tenant: str, asked: tuple[str, TokenIds], one: Completion) -> str:
    model, prompt = asked
    sequence = StoreSequence(
        id=new_id("seq"),
        model=model,
        prompt=list(prompt),
        tokens=list(one.tokens),
        logprobs=list(one.logprobs),
    )
    await gate.service.change("store_sequence", tenant, sequence)
    return sequence.id


def text_choice(
    one: Completion, codec: Codec, prompt: TokenIds, *, has_logprobs: bool
) -> dict[str, Any]:
    """One answer to a prompt."""
    choice: dict[str, Any] = {
        "text": one.text,
        "finish_reason": one.finish_reason,
        "token_ids": list(one.tokens),
        "prompt_token_ids": list(prompt),
        "logprobs": None,
    }
    if has_logprobs:
        texts = [codec.decode((token,)) for token in one.tokens]
        tops = [{codec.decode((t,)): lp for t, lp in row} for row in one.top_logprobs]
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": list(one.logprobs),
            "top_logprobs": tops or None,
            "text_offset": _offsets(texts),
        }
    return choice


def chat_choice(
    one: Completion, codec: Codec, prompt: TokenIds, *, has_logprobs: bool
) -> dict[str, Any]:
    """One answer to a chat."""
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": one.text},
        "finish_reason": one.finish_reason,
        "token_ids": list(one.tokens),
        "prompt_token_ids": list(prompt),
        "logprobs": None,
    }
    if has_logprobs:
        rows: list[TopLogprobs] = list(one.top_logprobs) or [()] * len(one.tokens)
        choice["logprobs"] = {
            "content": [
                {**_token(codec, token, lp), "top_logprobs": [_token(codec, *pair) for pair in row]}
                for token, lp, row in zip(one.tokens, one.logprobs, rows, strict=True)
            ]
        }
    return choice


def _token(codec: Codec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.decode((token,))
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _offsets(texts: list[str]) -> list[int]:
    offsets, place = [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    return offsets


def response_of(
    kind: Literal["text_completion", "chat.completion"],
    model: str,
    choices: list[dict[str, Any]],
    prompts: list[TokenIds],
) -> dict[str, Any]:
    """The answer to a request, with what it cost."""
    num_prompt = sum(map(len, prompts))
    num_drawn = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "id": new_id("cmpl"),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": place, **choice} for place, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
        },
    }
