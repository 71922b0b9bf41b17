"""A route in vLLM's API processes: tokens in, tokens out, and an adapter along with them.

vLLM loads it by `--middleware`, on servers that only this machine reaches. Other servers are asked
by `/v1/completions`.

    POST /rookery/generate
    {"model": "poet@3fa9", "path": "/dev/shm/.../poet@3fa9.bfloat16.buffer",
     "prompts": [[1, 2, 3], ...], "params": {"max_tokens": 16, "n": 1, "seed": 7, ...}}
    -> {"choices": [{"index": 0, "text": "...", "finish_reason": "stop", "token_ids": [5, 2],
                     "token_logprobs": [-0.1, -2.5], "top": [[[5, 9], [-0.1, -3.0]], ...],
                     "prompt_top": [null, [[2, 8], [-1.5, -0.9]], ...],
                     "versions": [["step-3", 0, 1], ["step-4", 1, 2]]}, ...]}

The extra work of `/v1/completions` takes longer than a GPU needs for the tokens: a string and an
object per token and per likely token, the text of every prefix. Here the text is made once, at the
end. `versions` says which base weights drew which tokens, if vLLM was told their names. `path` is
loaded on its first use, so that an adapter and its first request are one call, and reach the engine
one right after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from .whole_answers import WHOLE

__all__ = ["TokenRoute"]

PATH = "/rookery/generate"
FORMAT = 1
ADAPTER_REFUSED = 424
"""Status of a request whose adapter the server cannot load."""
_FLOOR = -9999.0
"""vLLM's number for minus infinity, which JSON cannot express."""
_BROKEN = "\ufffd"
"""Character that a tokenizer writes for an incomplete one."""
_CONTEXT = 5
"""Tokens of the prompt to decode before the text, as a token at the start loses its space."""
_UNNAMED = "default"
"""vLLM's name for weights that were never named."""
_OF_REQUESTS = (ValueError, KeyError, TypeError, OverflowError)
"""Errors raised by missing, mistyped or too large fields."""
_CLIENT_ERRORS = frozenset({"VLLMClientError", "VLLMValidationError"})
"""vLLM's own errors, by name: newer ones are no ValueError, older versions lack one."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Generate = Callable[[Any], Coroutine[Any, Any, list[Any]]]


class _Refused(Exception):
    """A request that cannot be served, with the status and message of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TokenRoute:
    """ASGI middleware that answers its own path and passes on everything else."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        # Middleware runs before vLLM checks the key.
        self._is_open = not os.environ.get("VLLM_API_KEY")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._is_open or scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] == "GET":
                status, answer = 200, _described()
            else:
                work = _generate(scope["app"].state, json.loads(await _body(receive)))
                status, answer = 200, await _until_gone(work, receive)
        except _Refused as refused:
            status, answer = refused.status, {"error": {"message": str(refused)}}
        except Exception as error:  # vLLM's differ by version; only the caller's are answered
            blamed = _blamed(error)
            if blamed is None:
                raise
            status, answer = 400, {"error": {"message": blamed}}
        if answer is not None:
            await _send_json(send, status, answer)


def _blamed(error: BaseException) -> str | None:
    """Return what the request did wrong; None if it did not cause the error. An error that leaves
    this route closes the connection, and the client takes the server for lost."""
    if type(error).__name__ == "EngineGenerateError" and error.__cause__ is not None:
        error = error.__cause__
    names = {kind.__name__ for kind in type(error).__mro__}
    if not isinstance(error, _OF_REQUESTS) and _CLIENT_ERRORS.isdisjoint(names):
        return None
    is_bare = isinstance(error, KeyError | TypeError | OverflowError)
    return f"{type(error).__name__}: {error}" if is_bare else str(error)


def _described() -> dict[str, Any]:
    """Describe the route; the imports fail if vLLM lacks what it needs."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
    LoRARequest(lora_name="a", lora_int_id=1, lora_path="b")
    return {"format": FORMAT}


async def _generate(state: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not isinstance(request, dict) or not isinstance(request.get("params"), dict):
        raise _Refused(400, "a request is an object with the fields model, path, prompts, params")
    # Stop strings are searched while the text grows; without them the text can wait.
    is_watched = bool(request["params"].get("stop"))
    params = SamplingParams(
        **request["params"],
        detokenize=is_watched,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = state.engine_client
    name = f"{'rookery-' if is_watched else WHOLE}{uuid.uuid4().hex}"

    async def generate(lora: Any) -> list[Any]:
        return await _gathered(
            [
                _last(
                    engine.generate(
                        {"type": "token", "prompt_token_ids": prompt},
                        params,
                        f"{name}-{i}",
                        lora_request=lora,
                    )
                )
                for i, prompt in enumerate(request["prompts"])
            ]
        )

    outputs = await _with_adapter(state, request, generate)
    tokenizer = None if is_watched else state.openai_serving_models.renderer.tokenizer
    return {
        "choices": [
            _choice(i * params.n + sample.index, output, sample, tokenizer, request["params"])
            for i, output in enumerate(outputs)
            for sample in output.outputs
        ]
    }


async def _with_adapter(state: Any, request: dict[str, Any], generate: Generate) -> list[Any]:
    """Return the result of `generate` with the LoRARequest that the request names, or with None."""
    models, name, path = state.openai_serving_models, request["model"], request["path"]
    loaded = models.lora_requests
    if path is None or name in loaded:
        return await generate(None if path is None else loaded[name])
    async with models.lora_resolver_lock[name]:
        # If two requests name it first together, the other one has loaded it by now.
        if name in loaded:
            making = asyncio.create_task(generate(loaded[name]))
        else:
            making = await _load_and_start(state, name, path, generate)
    try:
        return await making
    finally:
        making.cancel()


async def _load_and_start(
    state: Any, name: str, path: str, generate: Generate
) -> asyncio.Task[list[Any]]:
    """Have an adapter loaded, while `generate` is already on its way to the engine. The engine
    handles them in order. If the load fails, `extension.py` answers the request with an adapter
    that does nothing, and the result is discarded."""
    from vllm.lora.request import LoRARequest

    models = state.openai_serving_models
    if not getattr(state, "rookery_is_attached", False):
        # Before the first adapter: a worker that cannot read buffers would die of the request.
        await state.engine_client.collective_rpc("rookery_attach")
        state.rookery_is_attached = True
    lora = LoRARequest(lora_name=name, lora_int_id=models.lora_id_counter.inc(1), lora_path=path)
    adding = asyncio.ensure_future(state.engine_client.add_lora(lora))
    await asyncio.sleep(0)  # up to its first wait, for the engine's answer
    making = asyncio.create_task(generate(lora))
    try:
        await adding
    except BaseException as error:  # vLLM raises a plain Exception; a cancelled wait ends both
        making.cancel()
        if isinstance(error, asyncio.CancelledError):
            raise
        raise _Refused(ADAPTER_REFUSED, f"{name} cannot be loaded: {error}") from None
    models.lora_requests[name] = lora
    return making


async def _last(outputs: Any) -> Any:
    return [output async for output in outputs][-1]


async def _gathered(work: list[Any]) -> list[Any]:
    """Return all results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _until_gone(work: Any, receive: Receive) -> Any:
    """Return the result; None if the client disconnected first, which cancels the work."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _choice(
    index: int, output: Any, sample: Any, tokenizer: Any, params: dict[str, Any]
) -> dict[str, Any]:
    tokens = list(sample.token_ids)
    positions = _positions(sample.logprobs, len(tokens))
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "token_ids": tokens,
        "token_logprobs": [logprobs[0] for _, logprobs in positions],
    }
    if tokenizer is not None:
        # The token that stopped generation is no part of the text.
        shown = tokens[:-1] if sample.finish_reason == "stop" else tokens
        choice["text"] = _text(tokenizer, output.prompt_token_ids, shown)
    # Before 0.32 there are none.
    spans = getattr(sample, "weight_versions", None) or ()
    if any(span.version != _UNNAMED for span in spans):
        choice["versions"] = [(span.version, span.start, span.end) for span in spans]
    if params.get("logprobs"):
        choice["top"] = positions
    if params.get("prompt_logprobs") is not None:
        inside = output.prompt_logprobs
        choice["prompt_top"] = [
            position if position[0] else None for position in _positions(inside, len(inside))
        ]
    return choice


def _positions(flat: Any, num: int) -> list[tuple[list[int], list[float]]]:
    """Return per position the reported tokens, drawn one first, and their log-probabilities."""
    tops = []
    for begin, end in zip(flat.start_indices[:num], flat.end_indices[:num], strict=True):
        logprobs = [
            value if value > _FLOOR else _floored(value) for value in flat.logprobs[begin:end]
        ]
        tops.append((flat.token_ids[begin:end], logprobs))
    return tops


def _floored(value: float) -> Any:
    """Return vLLM's number for minus infinity; None for NaN."""
    return _FLOOR if value <= _FLOOR else None


def _text(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that the tokens add to the prompt's, without an incomplete last character."""
    if not tokens:
        return ""
    context = prompt[-_CONTEXT:]
    before = tokenizer.decode(context, skip_special_tokens=True).rstrip(_BROKEN)
    whole = tokenizer.decode(context + tokens, skip_special_tokens=True)
    if not whole.startswith(before):
        before, whole = "", tokenizer.decode(tokens, skip_special_tokens=True)
    return str(whole[len(before) :].rstrip(_BROKEN))


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, "the request was not sent to its end")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _send_json(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
