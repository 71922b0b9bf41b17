"""The routes that environments ask the engine by; the newest policy answers, whatever they name.

| route                    | for                                                               |
|--------------------------|-------------------------------------------------------------------|
| `/health`                | whoever waits for the engine                                      |
| `/generate`              | `server_type: vllm` of atroposlib: tokens in, log-probabilities out |
| `/inference/v1/generate` | vLLM's tokens in, tokens out, as the train client of verifiers    |
| `/v1/...`                | OpenAI clients                                                    |
"""

import asyncio
import secrets
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from rookery.compat.atropos.engine_side import EngineSide
from rookery.concurrency import together
from rookery.errors import TaskError
from rookery.service.drawing import encode_prompts
from rookery.service.openai.routes import (
    ChatRequest,
    CompletionRequest,
    chat_choice,
    read_prompts,
    response_of,
    text_choice,
)
from rookery.service.openai.stream import usage_of
from rookery.service.records import Rows
from rookery.service.routes.json_route import DrawingRoute, SlicedResponse, encode_answer
from rookery.service.wire.requests import MAX_COUNT, TokenOptions
from rookery.service.work import bad
from rookery.types import Completion, Score, TokenIds

__all__ = ["make_router"]

MODEL = "policy"
"""What the policy is listed as."""
DEFAULT_TOKENS = 16
"""As many as vLLM draws for a request that does not say."""


class Sampling(TokenOptions):
    """How to draw, in vLLM's words."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=DEFAULT_TOKENS, ge=1, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_COUNT)


class TokenPrompt(BaseModel):
    """A prompt that is tokens already."""

    prompt_token_ids: list[int] = Field(min_length=1)


class GenerateRequest(Sampling):
    """A request of `server_type: vllm`."""

    prompt: TokenPrompt | list[int] | str


class TokensRequest(BaseModel):
    """A request of vLLM's tokens in, tokens out."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    request_id: str = ""


def make_router(side: EngineSide) -> APIRouter:
    router = APIRouter(tags=["engine"], route_class=DrawingRoute)

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/generate")
    async def generate(body: GenerateRequest) -> Response:
        return await _written(_generate(side, body))

    @router.post("/inference/v1/generate")
    async def generate_tokens(body: TokensRequest) -> Response:
        return await _written(_generate_tokens(side, body))

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        row = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rookery"}
        return {"object": "list", "data": [row | {"max_model_len": side.context_tokens}]}

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        return await _written(_complete(side, body))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        return await _written(_chat(side, body))

    return router


async def _written(answer: Awaitable[Mapping[str, Any]]) -> Response:
    return SlicedResponse(await asyncio.to_thread(encode_answer, await answer))


async def _generate(side: EngineSide, body: GenerateRequest) -> dict[str, Any]:
    prompt = await _tokens(side, body.prompt)
    params = body.params(max_tokens=_room(side, body.max_tokens, prompt), seed=_seed(body))
    drawn = await side.draw(prompt, params)
    score = None
    if body.prompt_logprobs is not None:
        score = await side.score(prompt, top_logprobs=body.prompt_logprobs)
    answer: dict[str, Any] = {
        "text": [one.text for one in drawn],
        "prompt": body.prompt if isinstance(body.prompt, str) else "",
        "finish_reasons": [one.finish_reason for one in drawn],
        "prompt_token_ids": prompt,
        "token_ids": Rows(drawn, lambda one: one.tokens),
    }
    if body.logprobs is not None:
        answer["logprobs"] = Rows(drawn, _vllm_logprobs)
    if score is not None:
        answer["prompt_logprobs"] = _prompt_logprobs(prompt, score)
    return answer


async def _generate_tokens(side: EngineSide, body: TokensRequest) -> dict[str, Any]:
    prompt, how = tuple(body.token_ids), body.sampling_params
    params = how.params(max_tokens=_room(side, how.max_tokens, prompt), seed=_seed(how))
    drawn = await side.draw(prompt, params)
    return {
        "request_id": body.request_id or secrets.token_hex(8),
        "model": MODEL,
        "choices": Rows(list(enumerate(drawn)), lambda row: _token_choice(*row)),
        "prompt_token_ids": prompt,
        "usage": usage_of([prompt], sum(len(one.tokens) for one in drawn)),
    }


def _token_choice(place: int, one: Completion) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(one.tokens, one.logprobs, strict=True)
    ]
    return {
        "index": place,
        "finish_reason": one.finish_reason,
        "token_ids": list(one.tokens),
        "logprobs": {"content": content},
    }


async def _complete(side: EngineSide, body: CompletionRequest) -> dict[str, Any]:
    _refuse("stream", is_given=body.stream)
    prompts = await asyncio.to_thread(encode_prompts, side.codec, read_prompts(body))

    async def draw(prompt: TokenIds) -> tuple[Completion, ...]:
        limit = _room(side, body.max_tokens, prompt)
        params = body.params(max_tokens=limit, seed=_seed(body), top_logprobs=body.logprobs or 0)
        return await side.draw(prompt, params)

    answers = await together(draw(prompt) for prompt in prompts)
    choice = partial(text_choice, side.codec, has_logprobs=body.logprobs is not None)
    return response_of("text_completion", body.model, (prompts, answers), choice)


async def _chat(side: EngineSide, body: ChatRequest) -> dict[str, Any]:
    _refuse("stream", is_given=body.stream)
    _refuse("tools", is_given=bool(body.offered))
    _refuse("response_format", is_given=bool(body.json_schema))
    messages = tuple(one.message for one in body.messages)
    try:
        prompt = await asyncio.to_thread(side.codec.encode_chat, messages)
    except TaskError as error:
        raise bad(str(error)) from error
    limit = _room(side, body.max_completion_tokens or body.max_tokens, prompt)
    top = (body.top_logprobs or 0) if body.logprobs else 0
    drawn = await side.draw(
        prompt, body.params(max_tokens=limit, seed=_seed(body), top_logprobs=top)
    )
    choice = partial(chat_choice, side.codec, body)
    return response_of("chat.completion", body.model, ([prompt], [drawn]), choice)


async def _tokens(side: EngineSide, prompt: TokenPrompt | list[int] | str) -> TokenIds:
    if isinstance(prompt, str):
        return await asyncio.to_thread(side.codec.encode, prompt)
    return tuple(prompt.prompt_token_ids if isinstance(prompt, TokenPrompt) else prompt)


def _room(side: EngineSide, asked: int | None, prompt: TokenIds) -> int:
    """Tokens to draw at most: what is asked, within the context."""
    if side.context_tokens is None:
        return asked or DEFAULT_TOKENS
    room = side.context_tokens - len(prompt)
    if room < 1:
        raise bad(
            f"The prompt has {len(prompt)} tokens and the model reads {side.context_tokens}: "
            "shorten it."
        )
    return min(asked or room, room)


def _vllm_logprobs(one: Completion) -> list[list[dict[str, float]]]:
    return [[{str(t): logprob}] for t, logprob in zip(one.tokens, one.logprobs, strict=True)]


def _prompt_logprobs(prompt: TokenIds, score: Score) -> list[dict[str, float] | None]:
    """Of every token of the prompt with the likeliest beside it; the first has none."""
    rows: list[dict[str, float] | None] = [None]
    for place, logprob in enumerate(score.logprobs):
        top = score.top_logprobs[place] if score.top_logprobs else ()
        rows.append({str(token): value for token, value in top} | {str(prompt[place + 1]): logprob})
    return rows


def _refuse(option: str, *, is_given: bool) -> None:
    """What `rookery serve` has and environments have no use for."""
    if is_given:
        raise bad(f"{option} is not supported: leave it out.")


def _seed(options: TokenOptions) -> int:
    return secrets.randbits(62) if options.seed is None else options.seed
