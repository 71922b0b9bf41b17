"""An external OpenAI-compatible API as a `Sampler`, within its request and token rate limits.

    config = ExternalConfig(url="https://api.example.com/v1", model="big", requests_per_minute=60)
    async with open_external(config, codec=Codec(encode=encode, decode=decode)) as sampler:
        [[completion]] = await sampler.sample([SampleRequest(model=sampler.base, prompt=tokens)])

Such an API reads and writes text. Prompts are decoded and answers encoded with the caller's own
tokenizer; log-probabilities are given where the API reports them for exactly those tokens, and are
empty otherwise: they are never made up.

| what goes wrong                                      | is raised      | and then               |
|------------------------------------------------------|----------------|------------------------|
| no connection, busy for `busy_s`, key, credit, model | FleetDownError | the run can be resumed |
| 500 to 599 otherwise                                 | ServerLost     | sent again once        |
| no answer in time                                    | ServerLost     |                        |
| 400 to 499 otherwise                                 | ServerRefusal  |                        |
| an answer that is filtered, cut off or unreadable    | FleetError     |                        |

A call is all its requests: one that fails ends the others, sent or not, as nobody would see their
answers.
"""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from rookery.concurrency import together
from rookery.config import Config
from rookery.errors import ConfigError, FleetDownError, FleetError, boundary
from rookery.fleet.http.client import (
    Client,
    ClientConfig,
    ServerBusy,
    ServerLost,
    ServerRefusal,
    open_session,
)
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

Result = TypeVar("Result")
MAX_TOP = 20
"""The most likely tokens that OpenAI-compatible APIs report per position at most."""
MINUTE_S = 60.0
NO_REQUEST = frozenset({401, 402, 404, 429})
"""Refusals of everybody: no key, no credit (a 429 that waiting does not help), no such model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """The tokenizer of whoever asks: text to tokens and back."""

    encode: Callable[[str], TokenIds]
    decode: Callable[[TokenIds], str]


class ExternalClientConfig(ClientConfig):
    """Time limits of requests to an API."""

    busy_s: float = Field(default=300.0, ge=0)
    """How long a request waits while the API answers 429 or 503; its Retry-After is kept. One that
    asks for more is given up at once."""


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
    requests_per_minute: float = Field(default=100.0, ge=1)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Prompt and new tokens together, as most providers count; none by default."""
    max_in_flight: int = Field(default=8, ge=1)
    client: ExternalClientConfig = ExternalClientConfig()


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
        self.context_tokens: int | None = None
        """APIs do not tell."""
        self.config = config
        self._client = client
        self._codec = codec
        self._requests, self._tokens = limits
        # Filled by every request, drained by its answer; bounds what the provider sees at once.
        self._in_flight = asyncio.Semaphore(config.max_in_flight)
        self._calls: set[asyncio.Timeout] = set()
        """Calls that wait; the timeout of each is when the sampler closes."""
        self._is_closed = False

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        for request in requests:
            self._require(request.model)
            _require_text_params(request.params)
        return await self._all(self._sample(request) for request in requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probabilities of labels after a prompt, as far as the API reports them."""
        for request in requests:
            self._require(request.model)
            self._require_labels(request)
        return await self._all(self._score(request) for request in requests)

    def close(self) -> None:
        """Tell all who wait, at once."""
        self._is_closed = True
        for call in self._calls:
            call.reschedule(asyncio.get_running_loop().time())

    async def _all(self, works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
        """All results, in order; the first error, or the end of the sampler, ends the others."""
        closed = FleetDownError(f"The connection to {self.config.url} was closed here.")
        if self._is_closed:
            raise closed
        call = asyncio.timeout(None)
        self._calls.add(call)
        try:
            async with call:
                return await together(works)
        except (TimeoutError, FleetError):
            if self._is_closed:
                raise closed from None
            raise
        finally:
            self._calls.discard(call)

    async def _sample(self, request: SampleRequest) -> tuple[Completion, ...]:
        params = request.params
        body = self._body(request.prompt, params)
        cost = len(request.prompt) + params.n * params.max_tokens
        choices = await self._ask(body, cost=cost, num=params.n)
        with boundary(FleetError, f"{self.config.model} answered what cannot be read"):
            return tuple(self._completion(choice, request) for choice in choices)

    async def _score(self, request: ScoreRequest) -> Score:
        body = self._body(request.tokens, SamplingParams(max_tokens=1), num_top=MAX_TOP)
        [choice] = await self._ask(body, cost=len(request.tokens) + 1, num=1)
        with boundary(FleetError, f"{self.config.model} answered what cannot be read"):
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

    def _body(
        self, prompt: TokenIds, params: SamplingParams, *, num_top: int = 0
    ) -> dict[str, Any]:
        """Parameters that only some APIs know are sent when they are set: others refuse them."""
        text = self._codec.decode(prompt)
        body: dict[str, Any] = {
            "model": self.config.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "n": params.n,
            "seed": params.seed,
        }
        optional = {"stop": list(params.stop), "top_k": params.top_k, "min_p": params.min_p}
        body |= {name: value for name, value in optional.items() if value}
        if self.config.route == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.config.logprobs and self.config.route == "chat":
            body |= {"logprobs": True, "top_logprobs": num_top}
        elif self.config.logprobs:
            body["logprobs"] = num_top
        return body

    async def _ask(self, body: Mapping[str, Any], *, cost: int, num: int) -> list[Any]:
        """One request within the limits. Those of requests come first: they are the scarcer."""
        if self._tokens is not None and cost > self._tokens.max_rate:
            raise FleetError(
                f"A request of {cost} tokens can never keep to tokens_per_minute "
                f"{self._tokens.max_rate:g}: shorten the prompt, lower max_tokens or raise it."
            )
        content = json.dumps(body).encode()
        async with self._in_flight:
            # Where a failed request made room for this one, its call ends now, before a request
            # is sent that nobody reads.
            await asyncio.sleep(0)
            try:
                answer = await self._post(content, cost=cost)
            except ServerLost as loss:
                if loss.status is None:
                    raise
                answer = await self._post(content, cost=cost)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != num:
            raise FleetError(
                f"{self.config.model} answered {choices!r:.80} where {num} choices were asked for."
            )
        return choices

    async def _post(self, content: bytes, *, cost: int) -> Any:
        async def admit() -> None:
            await self._requests.acquire()
            if self._tokens is not None:
                await self._tokens.acquire(cost)

        limit_s = self.config.client.request_s
        path = "/v1/chat/completions" if self.config.route == "chat" else "/v1/completions"
        try:
            # Every attempt counts: the provider counts those that it answers with 429 too.
            return await self._client.post(path, content, limit_s=limit_s, admit=admit)
        except ServerRefusal as refusal:
            if refusal.status in NO_REQUEST:
                raise FleetDownError(str(refusal)) from refusal
            raise
        except ServerLost as loss:
            if loss.is_broken or isinstance(loss, ServerBusy):
                raise FleetDownError(str(loss)) from loss
            raise

    def _completion(self, choice: Mapping[str, Any], request: SampleRequest) -> Completion:
        message = choice.get("message") or {}
        text = message.get("content") if self.config.route == "chat" else choice.get("text")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length") or not isinstance(text, str):
            why = message.get("refusal") or f"it ended as {reason!r}"
            raise FleetError(f"{self.config.model} gave no whole answer: {why}.")
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
            finish_reason=reason,
        )

    def _require(self, ref: ModelRef) -> None:
        if ref != self.base:
            raise FleetError(
                f"{ref.served_name} cannot be served: {self.config.model} takes no adapters. "
                f"Name {self.base.served_name}, or use a vLLM fleet."
            )

    def _require_labels(self, request: ScoreRequest) -> None:
        if not self.config.logprobs:
            raise FleetError(
                "Scoring labels on an external API needs logprobs: true in its config."
            )
        if request.start < len(request.tokens) or not request.labels or request.top_logprobs:
            raise FleetError(
                "An external API reports no log-probabilities of a given text and no token ids; it "
                "can score labels after a text: set start to the number of tokens and top_logprobs "
                "to 0, or use a vLLM server."
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
        limits = (requests, tokens)
        with contextlib.closing(
            ExternalSampler(client, config=config, codec=codec, limits=limits)
        ) as sampler:
            yield sampler


def _require_text_params(params: SamplingParams) -> None:
    """What is said in token ids means nothing to an API of texts."""
    given = {
        "stop_tokens": params.stop_tokens,
        "ignore_eos": params.ignore_eos,
        "top_logprobs": params.top_logprobs,
    }
    for name, value in given.items():
        if value:
            raise FleetError(
                f"{name} is {value!r}; an external API reads and writes text, not token ids, and "
                "cannot do this: leave it out, stop at texts (stop), or use a vLLM server."
            )


def _positions(choice: Mapping[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Per new position: the token drawn, its log-probability, the likeliest; from either route."""
    found = choice.get("logprobs") or {}
    if found.get("content"):
        return [
            (
                entry["token"],
                _logprob(entry["logprob"]),
                [
                    (top["token"], _logprob(top["logprob"]))
                    for top in entry.get("top_logprobs") or []
                ],
            )
            for entry in found["content"]
        ]
    tops = found.get("top_logprobs") or []
    drawn = zip(found.get("tokens") or [], found.get("token_logprobs") or [], strict=True)
    return [
        (
            token,
            _logprob(logprob),
            [(top, _logprob(value)) for top, value in (tops[i] or {}).items()]
            if i < len(tops)
            else [],
        )
        for i, (token, logprob) in enumerate(drawn)
    ]


def _logprob(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise FleetError(
            f"The API answered {value!r:.40} for a log-probability; Rookery does not invent them: "
            "set logprobs: false, or use another API."
        )
    return float(value)
