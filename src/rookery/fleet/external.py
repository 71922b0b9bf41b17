"""An external OpenAI-compatible API as a `Sampler`, within its request and token rate limits.

    config = ExternalConfig(url="https://api.example.com/v1", model="big", requests_per_minute=60)
    async with open_external(config, codec=Codec(encode=encode, decode=decode)) as sampler:
        [[completion]] = await sampler.sample([SampleRequest(model=sampler.base, prompt=tokens)])

Such an API reads and writes text. Prompts are decoded and answers encoded with the caller's own
tokenizer; log-probabilities are given where the API reports them for exactly those tokens, and are
empty otherwise: they are never made up.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import ConfigError, FleetError
from rookery.fleet.client import Client, ClientConfig, open_session
from rookery.types import (
    Completion,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenIds,
)

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

__all__ = ["Codec", "ExternalConfig", "ExternalSampler", "open_external"]

MAX_TOP = 20
"""The most likely tokens that OpenAI-compatible APIs report per position at most."""
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """The tokenizer of whoever asks: text to tokens and back."""

    encode: Callable[[str], TokenIds]
    decode: Callable[[TokenIds], str]


class ExternalConfig(Config):
    """An API that is not ours: it has a key, and limits."""

    type: Literal["external"] = "external"
    url: str
    """Up to and with /v1."""
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key."""
    route: Literal["chat", "completions"] = "chat"
    """`completions` continues a text, `chat` answers it as one message of a user."""
    logprobs: bool = False
    """Ask for log-probabilities; some APIs refuse requests that do. Scoring labels needs them."""
    requests_per_minute: float = Field(default=100.0, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Prompt and new tokens together, as most providers count; none by default."""
    max_in_flight: int = Field(default=8, ge=1)
    client: ClientConfig = ClientConfig()


class ExternalSampler:
    """A Sampler over one API; `open_external` makes one."""

    def __init__(
        self,
        client: Client,
        *,
        config: ExternalConfig,
        codec: Codec,
        limits: "tuple[AsyncLimiter, AsyncLimiter | None]",
    ) -> None:
        self.base = ModelRef(name="base", version=config.model)
        self.config = config
        self._client = client
        self._codec = codec
        self._requests, self._tokens = limits
        # Filled by every request, drained by its answer; bounds what the provider sees at once.
        self._in_flight = asyncio.Semaphore(config.max_in_flight)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        return list(await asyncio.gather(*(self._sample(request) for request in requests)))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probabilities of labels after a prompt, as far as the API reports them."""
        return list(await asyncio.gather(*(self._score(request) for request in requests)))

    async def _sample(self, request: SampleRequest) -> tuple[Completion, ...]:
        self._require(request.model)
        params = request.params
        body = self._body(request.prompt, params)
        cost = len(request.prompt) + params.n * params.max_tokens
        choices = await self._ask(body, cost=cost, num=params.n)
        return tuple(self._completion(choice, request) for choice in choices)

    async def _score(self, request: ScoreRequest) -> Score:
        self._require(request.model)
        if not self.config.logprobs:
            raise FleetError(
                "Scoring labels on an external API needs logprobs: true in its config."
            )
        if request.start < len(request.tokens) or not request.labels:
            raise FleetError(
                "An external API reports no log-probabilities of a given text; it can score "
                "labels after it: set start to the number of tokens, or use a vLLM server."
            )
        params = SamplingParams(max_tokens=1, temperature=1.0, top_logprobs=MAX_TOP)
        body = self._body(request.tokens, params)
        [choice] = await self._ask(body, cost=len(request.tokens) + 1, num=1)
        positions = _positions(choice)
        if not positions:
            raise FleetError(f"{self.config.model} reports no log-probabilities: labels need them.")
        found = dict(positions[0][2])
        names = [self._codec.decode((label,)) for label in request.labels]
        missing = [name for name in names if name not in found]
        if missing:
            raise FleetError(
                f"The labels {missing} are not among the {len(found)} likeliest tokens that "
                f"{self.config.model} reports; Rookery does not invent their log-probabilities. "
                "Use labels that are one likely token each, or a vLLM server."
            )
        return Score(
            model=request.model, logprobs=(), label_logprobs=tuple(found[name] for name in names)
        )

    def _body(self, prompt: TokenIds, params: SamplingParams) -> dict[str, Any]:
        text = self._codec.decode(prompt)
        body: dict[str, Any] = {
            "model": self.config.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "n": params.n,
            "seed": params.seed,
        }
        if params.stop:
            body["stop"] = list(params.stop)
        if self.config.route == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        top = min(params.top_logprobs, MAX_TOP)
        if self.config.logprobs and self.config.route == "chat":
            body |= {"logprobs": True, "top_logprobs": top}
        elif self.config.logprobs:
            body["logprobs"] = top
        return body

    async def _ask(self, body: Mapping[str, Any], *, cost: int, num: int) -> list[Any]:
        """One request within the limits. Those of requests come first: they are the scarcer."""
        if self._tokens is not None and cost > self._tokens.max_rate:
            raise FleetError(
                f"A request of {cost} tokens can never keep to tokens_per_minute "
                f"{self._tokens.max_rate:g}: shorten the prompt, lower max_tokens or raise it."
            )
        path = "/v1/chat/completions" if self.config.route == "chat" else "/v1/completions"
        async with self._in_flight:
            await self._requests.acquire()
            if self._tokens is not None:
                await self._tokens.acquire(cost)
            limit_s = self.config.client.request_s
            answer = await self._client.post(path, json.dumps(body).encode(), limit_s=limit_s)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != num:
            raise FleetError(
                f"{self._client.url}{path} answered {choices!r:.80} for {num} choices."
            )
        return choices

    def _completion(self, choice: Mapping[str, Any], request: SampleRequest) -> Completion:
        message = choice.get("message") or {}
        text = (message.get("content") if self.config.route == "chat" else choice.get("text")) or ""
        tokens = self._codec.encode(text)
        positions = _positions(choice)
        is_aligned = [name for name, _, _ in positions] == [
            self._codec.decode((token,)) for token in tokens
        ]
        return Completion(
            model=request.model,
            tokens=tokens,
            logprobs=tuple(value for _, value, _ in positions) if is_aligned else (),
            text=text,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        )

    def _require(self, ref: ModelRef) -> None:
        if ref != self.base:
            raise FleetError(
                f"{ref.served_name} cannot be served: {self.config.model} takes no adapters. "
                f"Name {self.base.served_name}, or use a vLLM fleet."
            )


@asynccontextmanager
async def open_external(config: ExternalConfig, *, codec: Codec) -> AsyncIterator[ExternalSampler]:
    """Connect to the API; its key must be in the environment."""
    key = os.environ.get(config.api_key_env, "")
    if not key:
        raise ConfigError(
            f"{config.url} needs a key, and {config.api_key_env} is not set: export it, or name "
            "another variable in api_key_env."
        )
    try:
        from aiolimiter import AsyncLimiter
    except ImportError as error:
        raise ConfigError(
            "External APIs need rate limits: pip install 'aiolimiter>=1.2'."
        ) from error
    requests = AsyncLimiter(config.requests_per_minute, MINUTE_S)
    tokens = None
    if config.tokens_per_minute is not None:
        tokens = AsyncLimiter(config.tokens_per_minute, MINUTE_S)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        client = Client(config.url, session=session, config=config.client, api_key=key)
        yield ExternalSampler(client, config=config, codec=codec, limits=(requests, tokens))


def _positions(choice: Mapping[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Per new position: the token drawn, its log-probability, the likeliest; from either route."""
    found = choice.get("logprobs") or {}
    if found.get("content"):
        return [
            (
                entry["token"],
                entry["logprob"],
                [(top["token"], top["logprob"]) for top in entry.get("top_logprobs") or []],
            )
            for entry in found["content"]
        ]
    tops = found.get("top_logprobs") or []
    return [
        (token, logprob, list((tops[i] or {}).items()) if i < len(tops) else [])
        for i, (token, logprob) in enumerate(
            zip(found.get("tokens") or [], found.get("token_logprobs") or [], strict=True)
        )
    ]
