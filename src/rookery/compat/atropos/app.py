"""The application of a gateway: the routes of `run-api`, the engine routes of environments, keys
and body limits.
"""

import asyncio
import gzip
import secrets
import zlib
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.compat.atropos.engine_side import EngineSide
from rookery.compat.atropos.gateway import Delivery, Gateway
from rookery.compat.atropos.group_queue import Registration, TrainerRegistration
from rookery.compat.atropos.scored_group import ScoredGroup
from rookery.compat.openai.routes import (
    ChatRequest,
    CompletionRequest,
    chat_choice,
    read_prompts,
    response_of,
    text_choice,
)
from rookery.compat.openai.stream import usage_of
from rookery.errors import TaskError
from rookery.runtime.app_shell import ErrorAnswers, key_check, make_app, too_large
from rookery.runtime.concurrency import together
from rookery.service.drawing import encode_prompts
from rookery.service.fair_queue import READERS, FairSemaphore
from rookery.service.records import JsonRows
from rookery.service.request_context import DrawingRoute, SlicedResponse, encode_answer
from rookery.service.requests import MAX_COUNT, TokenOptions
from rookery.service.work import Refusal, bad, status_of
from rookery.types import Completion, Score, TokenIds

__all__ = ["make_atropos_app", "make_engine_router"]


MODEL = "policy"
"""Model name under which the policy is listed."""
DEFAULT_TOKENS = 16
"""vLLM's default number of tokens to draw."""


class Sampling(TokenOptions):
    """Sampling options in vLLM's terms."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=DEFAULT_TOKENS, ge=1, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_COUNT)


class TokenPrompt(BaseModel):
    """A prompt given as tokens."""

    prompt_token_ids: list[int] = Field(min_length=1)


class GenerateRequest(Sampling):
    """A request of `server_type: vllm`."""

    prompt: TokenPrompt | list[int] | str


class TokensRequest(BaseModel):
    """A request of vLLM's route for tokens in and tokens out."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    request_id: str = ""


def make_engine_router(side: EngineSide) -> APIRouter:
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
        "token_ids": JsonRows(drawn, lambda one: one.tokens),
    }
    if body.logprobs is not None:
        answer["logprobs"] = JsonRows(drawn, _vllm_logprobs)
    if score is not None:
        answer["prompt_logprobs"] = _prompt_logprobs(prompt, score)
    return answer


async def _generate_tokens(side: EngineSide, body: TokensRequest) -> dict[str, Any]:
    prompt, sampling = tuple(body.token_ids), body.sampling_params
    params = sampling.params(
        max_tokens=_room(side, sampling.max_tokens, prompt), seed=_seed(sampling)
    )
    drawn = await side.draw(prompt, params)
    return {
        "request_id": body.request_id or secrets.token_hex(8),
        "model": MODEL,
        "choices": JsonRows(list(enumerate(drawn)), lambda row: _token_choice(*row)),
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
    """Return the limit on tokens to draw: as requested, within the context."""
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
    """Return each prompt token's log-probability with the likeliest; None for the first."""
    rows: list[dict[str, float] | None] = [None]
    for place, logprob in enumerate(score.logprobs):
        top = score.top_logprobs[place] if score.top_logprobs else ()
        rows.append({str(token): value for token, value in top} | {str(prompt[place + 1]): logprob})
    return rows


def _refuse(option: str, *, is_given: bool) -> None:
    """Refuse an option that only `rookery serve` supports."""
    if is_given:
        raise bad(f"{option} is not supported: leave it out.")


def _seed(options: TokenOptions) -> int:
    return secrets.randbits(62) if options.seed is None else options.seed


_ONE, _MANY = TypeAdapter(ScoredGroup), TypeAdapter(list[ScoredGroup])
_EMPTY = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params",
          "inference_logprobs", "messages", "images")  # fmt: skip
_OWN_TRAINER = (
    "This gateway belongs to a run that trains by itself: stop that run, or start a gateway alone "
    "with `rookery grpo gateway` and give trainers its address."
)


class EnvIdentifier(BaseModel):
    """Names the environment that asks."""

    env_id: int


def _make_router(gateway: Gateway, delivery: Delivery | None) -> APIRouter:
    """Without a delivery, batches go only to the trainer in this process."""
    router = APIRouter(tags=["atropos"])
    _add_taking_part(router, gateway, delivery)
    _add_groups(router, gateway)
    _add_batches(router, gateway, delivery)
    return router


def _add_taking_part(router: APIRouter, gateway: Gateway, delivery: Delivery | None) -> None:
    registry = gateway.registry

    @router.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @router.post("/register")
    async def register(trainer: TrainerRegistration) -> dict[str, int]:
        if delivery is None:
            raise Refusal(409, _OWN_TRAINER)
        try:
            number = registry.enter(trainer)
        except TaskError as error:
            raise Refusal(409, str(error)) from error
        delivery.begin()
        gateway.step = max(gateway.step, trainer.starting_step)
        return {"uuid": int(number)}

    @router.post("/register-env")
    async def register_env(registration: Registration) -> dict[str, Any]:
        environment = await gateway.register_env(registration)
        if environment is None or registry.trainer is None:
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": environment.id,
            "wandb_name": environment.name,
            "checkpoint_dir": registry.trainer.checkpoint_dir,
            "starting_step": gateway.step,
            "checkpoint_interval": registry.trainer.save_checkpoint_interval,
            "num_steps": registry.trainer.num_steps,
        }

    @router.post("/disconnect-env")
    async def disconnect_env(who: EnvIdentifier) -> dict[str, str]:
        try:
            await gateway.disconnect_env(who.env_id)
        except TaskError as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    @router.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        trainer = registry.trainer
        return {
            "group": None if trainer is None else trainer.wandb_group,
            "project": None if trainer is None else trainer.wandb_project,
        }

    @router.get("/info")
    async def info() -> dict[str, int]:
        trainer = registry.trainer
        return {
            "batch_size": -1 if trainer is None else trainer.batch_size,
            "max_token_len": -1 if trainer is None else trainer.max_token_len,
        }


def _add_groups(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/scored_data")
    async def scored_data(request: Request) -> dict[str, Any]:
        group = await _read(_ONE, request, gateway)
        buffered = await gateway.accept(group, is_gone=request.is_disconnected)
        if buffered is None:
            return {"status": "received"}
        return {"status": "buffered", "buffer_size": buffered}

    @router.post("/scored_data_list")
    async def scored_data_list(request: Request) -> dict[str, Any]:
        groups = await _read(_MANY, request, gateway)
        sizes = await gateway.accept_all(groups, is_gone=request.is_disconnected)
        kept = [size for size in sizes if size is not None]
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
        if kept:
            answer |= {"buffered": len(kept), "last_buffer_size": kept[-1]}
        return answer

    @router.get("/latest_example")
    async def latest_example() -> dict[str, Any]:
        if gateway.latest is None:
            return {name: [] for name in _EMPTY}
        return gateway.latest.model_dump(mode="json")

    @router.get("/status")
    async def status(trainer: str = "") -> dict[str, int]:
        if trainer:
            _hear_trainer(gateway, trainer)
        return {"current_step": gateway.step, "queue_size": len(gateway.queue.groups)}

    @router.get("/status-env")
    async def status_env(who: EnvIdentifier) -> dict[str, Any]:
        return gateway.registry.status(who.env_id, gateway.queue.groups, step=gateway.step)


def _add_batches(router: APIRouter, gateway: Gateway, delivery: Delivery | None) -> None:
    @router.get("/batch")
    async def batch(request: Request, after: int | None = None, trainer: str = "") -> Response:
        if delivery is None or gateway.registry.trainer is None:
            said = _OWN_TRAINER if delivery is None else "Register first with /register."
            return JSONResponse({"status": "error", "message": said, "batch": []})
        _hear_trainer(gateway, trainer)
        gateway.is_started = True
        number, entries = await delivery.next(after)
        if not entries:
            return JSONResponse({"batch": None})
        groups = [queued.group for queued in entries]
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        return await asyncio.to_thread(_batch_response, number, groups, is_packed=is_packed)

    @router.get("/reset_data")
    async def reset_data() -> PlainTextResponse:
        if delivery is None:
            raise Refusal(409, _OWN_TRAINER)
        await delivery.drop_all()
        for environment in gateway.registry.environments:
            await gateway.disconnect_env(environment.id)
        gateway.step, gateway.is_started = 0, False
        gateway.registry.leave()
        return PlainTextResponse("Reset successful")


def _hear_trainer(gateway: Gateway, trainer: str) -> None:
    try:
        gateway.registry.hear_trainer(trainer)
    except TaskError as error:
        raise Refusal(409, str(error)) from error


def _batch_response(number: int, groups: list[ScoredGroup], *, is_packed: bool) -> Response:
    """A batch may have millions of tokens: call this in a thread."""
    text = b'{"batch":%b,"batch_id":%d}' % (_MANY.dump_json(groups), number)
    headers = {"Content-Encoding": "gzip"} if is_packed else None
    content = gzip.compress(text, compresslevel=1) if is_packed else text
    return Response(content, media_type="application/json", headers=headers)


async def _read(kind: TypeAdapter[Any], request: Request, gateway: Gateway) -> Any:
    """Parse the body in a thread."""
    try:
        return await asyncio.to_thread(kind.validate_json, await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        said = f"{place}: {first['msg']}."
        gateway.note_refusal(said)
        raise bad(said) from error


GZIP_BYTES = 1000
"""Smallest answer in bytes to compress for clients that accept it."""
NO_KEY = (
    "This gateway asks for a key: send it as Authorization: Bearer KEY, or give its address as "
    "http://any:KEY@HOST:PORT."
)


def make_atropos_app(
    gateway: Gateway,
    *,
    delivery: Delivery | None,
    side: EngineSide | None,
    key: str,
    limit_bytes: int,
) -> FastAPI:
    """Make the app. Without a delivery the trainer is in this process; `side` is the engine."""
    app = make_app(
        "Rookery",
        summary="The Atropos API, with groups that are not lost.",
        answers=ErrorAnswers(status=_status),
        check=key_check(key, NO_KEY),
        limit_bytes=limit_bytes,
    )
    app.state.reading = FairSemaphore(READERS)
    app.include_router(_make_router(gateway, delivery))
    if side is not None:
        app.include_router(make_engine_router(side))
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_BYTES)
    app.add_middleware(GunzipMiddleware, limit_bytes=limit_bytes)
    return app


def _status(error: Exception) -> int:
    """Environments resend requests after 5xx, and drop them after 4xx."""
    status = status_of(error)
    return 422 if status == 400 else status


class GunzipMiddleware:
    """Reads compressed bodies whole and passes them on decompressed."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "gzip" not in Headers(scope=scope).get(
            "content-encoding", ""
        ):
            await self._app(scope, receive, send)
            return
        changed, is_read = MutableHeaders(scope=scope), False
        del changed["content-encoding"], changed["content-length"]

        async def receive_plain() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read, parts, size = True, list[bytes](), 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return message
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self._limit_bytes:
                    raise HTTPException(413, str(too_large(self._limit_bytes)))
                if not message.get("more_body"):
                    body = await asyncio.to_thread(self._inflate, b"".join(parts))
                    return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_plain, send)

    def _inflate(self, body: bytes) -> bytes:
        reader = zlib.decompressobj(wbits=31)
        try:
            plain = reader.decompress(body, self._limit_bytes + 1)
        except zlib.error as error:
            sentence = f"The body is not gzip, as its Content-Encoding says: {error}."
            raise HTTPException(400, sentence) from error
        if len(plain) > self._limit_bytes:
            raise HTTPException(413, str(too_large(self._limit_bytes)))
        return plain
