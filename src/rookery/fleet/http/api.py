"""The connection to an external OpenAI-compatible API: its key, rate limits and retries.

    async with open_api(ExternalConfig(url="https://api.example.com/v1", model="big")) as api:
        async with api.call():
            answer = await api.ask("/v1/chat/completions", body, cost=1200)

| what goes wrong                                | is raised          | and then                   |
|------------------------------------------------|--------------------|----------------------------|
| no connection, busy for `busy_s`, no credit    | FleetDownError     | nobody can be served now   |
| 401, 403 (the key), 404 (the model or the URL) | FleetSettingsError | waiting does not help      |
| 500 to 599 otherwise                           | ServerLost         | sent again once            |
| no answer in time                              | ServerLost         |                            |
| 400 to 499 otherwise                           | ServerRefusal      |                            |
| the same for each of the first `MAX_REFUSED`   | FleetSettingsError | the rest would be refused  |
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from rookery.config import Config, check_url
from rookery.errors import (
    ConfigError,
    FleetDownError,
    FleetError,
    FleetSettingsError,
    did_you_mean,
)
from rookery.fleet.http.client import (
    Client,
    ClientConfig,
    ServerBusy,
    ServerLost,
    ServerRefusal,
    open_session,
)
from rookery.runtime.concurrency import together
from rookery.types import TokenIds, TokenUsage

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

__all__ = ["Api", "ExternalConfig", "open_api", "read_usage", "tokenize"]

# Token ids of texts, by a server's own tokenizer.
#
#     [tokens] = await tokenize(client, ["Once upon a time"])


NUM_CALLS = 32
"""Texts in flight together: `/tokenize` takes one per call, and most of a call is waiting."""


async def tokenize(client: Client, prompts: Sequence[str | Sequence[int]]) -> list[TokenIds]:
    """Return each prompt's tokens, in order; prompts of token ids stay as they are."""
    places = asyncio.Semaphore(NUM_CALLS)  # filled by every text, drained by its answer

    async def ask(text: str) -> TokenIds:
        async with places:
            answer = await client.post_json("/tokenize", {"prompt": text})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise FleetError(f"{client.url}/tokenize answered no tokens: give token ids instead.")
        return tuple(tokens)

    texts = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
    known = dict(zip(texts, await together(map(ask, texts)), strict=True))
    return [known[p] if isinstance(p, str) else tuple(p) for p in prompts]


MINUTE_S = 60.0
NO_KEY = frozenset({401, 403})
NO_CREDIT = frozenset({402, 429})
"""Statuses for an account without credit; it may be topped up while a run waits."""
MAX_REFUSED = 3
"""An API that refused this many different requests before it answered any refuses all."""
CHECK_S = 10.0
MAX_NAMES = 8
"""Names of an API's models that an error message lists."""


class ExternalClientConfig(ClientConfig):
    """Time limits of requests to an API."""

    busy_s: float = Field(default=300.0, ge=0)
    """Seconds that a request waits while the API answers 429 or 503; Retry-After is obeyed. If it
    asks for more, the request fails at once."""


class ExternalConfig(Config):
    """An external API with a key and rate limits."""

    rounding: ClassVar[None] = None
    type: Literal["external"] = "external"
    url: str
    """URL up to and including /v1."""
    model: str
    """Name of the model at the API."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; empty if the API needs none."""
    route: Literal["chat", "completions"] = "chat"
    """`completions` continues a text; `chat` answers it as one user message."""
    logprobs: bool = False
    """Request log-probabilities, which some APIs refuse. Scoring labels needs them."""
    requests_per_minute: float | None = Field(default=100.0, ge=1)
    """Limit on requests per minute; None for no limit, as on one's own servers."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Limit on prompt and new tokens together, as most providers count; None for no limit."""
    max_in_flight: int = Field(default=8, ge=1)
    """Limit on requests at a time."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The API's field for the length of an answer. Models that know only `max_completion_tokens`
    (OpenAI's reasoning models) refuse temperature and top_p, which are then left out."""
    reasoning_effort: str | None = None
    """Sent unchanged if set."""
    takes_seed: bool = True
    """Write false if the API refuses requests with a seed."""
    client: ExternalClientConfig = ExternalClientConfig()

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        check_url(url, named="url is")
        return url


class Api:
    """One API under its limits, with counts of the tokens paid for; made by `open_api`."""

    def __init__(
        self,
        client: Client,
        *,
        config: ExternalConfig,
        limits: "tuple[AsyncLimiter | None, AsyncLimiter | None]",
        key_hint: str,
    ) -> None:
        self.config = config
        self.root = "/v1" if config.url.rstrip("/").endswith("/v1") else ""
        """Prefix of request paths: clients take a URL without /v1, and some APIs have no /v1."""
        self.num_answers = 0
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_unreported = 0
        """Answers that reported no token counts, which the two sums leave out."""
        self._client = client
        self._key_hint = key_hint
        self._requests, self._tokens = limits
        self._refused: set[bytes] = set()
        """Requests that were refused before any was answered."""
        # Filled by every request, drained by its answer; bounds what the provider has at once.
        self._in_flight = asyncio.Semaphore(config.max_in_flight)
        self._calls: set[asyncio.Timeout] = set()
        """Timeouts of waiting calls, which end when the connection closes."""
        self._is_closed = False

    def close(self) -> None:
        """Fail all waiting calls at once."""
        self._is_closed = True
        for call in self._calls:
            call.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def call(self) -> AsyncIterator[asyncio.Timeout]:
        """Run a block that waits for answers; it ends when the connection closes. TimeoutError if
        the block exceeds a limit that it set on the timeout it is given."""
        closed = FleetDownError(f"The connection to {self.config.url} was closed here.")
        if self._is_closed:
            raise closed
        call = asyncio.timeout(None)
        self._calls.add(call)
        try:
            async with call:
                yield call
        except (TimeoutError, FleetError):
            if self._is_closed:
                raise closed from None
            raise
        finally:
            self._calls.discard(call)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        cost: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Send one request of `cost` tokens within the limits; return the answer's JSON object.

        `is_wanted` is called before every attempt; FleetError if it returns False.
        """
        if self._tokens is not None and cost > self._tokens.max_rate:
            raise FleetError(
                f"A request of {cost} tokens can never fit tokens_per_minute "
                f"{self._tokens.max_rate:g}: shorten the prompt, lower max_tokens or raise it."
            )
        content = json.dumps(body).encode()

        async def admit() -> None:
            # The request limit comes first, as it is scarcer.
            if self._requests is not None:
                await self._requests.acquire()
            if self._tokens is not None:
                await self._tokens.acquire(cost)
            if not is_wanted():
                raise FleetError("Not sent: another request of the same call failed before it.")

        async with self._in_flight:
            try:
                answer = await self._post(path, content, admit)
            except ServerLost as loss:
                if loss.status is None:
                    raise
                answer = await self._post(path, content, admit)
        if not isinstance(answer, dict):
            raise FleetError(f"{self.config.model} answered {answer!r:.80}, no JSON object.")
        self._count(answer)
        return answer

    async def list_models(self) -> tuple[str, ...]:
        """Return the names of the API's models; empty if it lists none. FleetSettingsError if it
        refuses the key or requires one. Calls no model."""
        try:
            async with asyncio.timeout(CHECK_S):
                answer = await self._client.get(f"{self.root}/models")
        except ServerRefusal as refusal:
            if refusal.status in NO_KEY:
                raise self._no_key(refusal) from refusal
            return ()
        except (ServerLost, TimeoutError):
            return ()
        rows = answer.get("data") if isinstance(answer, dict) else None
        listed = rows if isinstance(rows, list) else []
        ids = [row.get("id") for row in listed if isinstance(row, dict)]
        # Some list `models/NAME` and accept NAME.
        return tuple(id.removeprefix("models/") for id in ids if isinstance(id, str))

    async def _post(self, path: str, content: bytes, admit: Callable[[], Any]) -> Any:
        limit_s = self.config.client.request_s
        try:
            # Every attempt counts: providers count those that they answer with 429 too.
            return await self._client.post(path, content, limit_s=limit_s, admit=admit)
        except ServerRefusal as refusal:
            raise await self._classify(refusal, content) from refusal
        except ServerLost as loss:
            if loss.is_broken or isinstance(loss, ServerBusy):
                raise FleetDownError(str(loss)) from loss
            raise

    async def _classify(self, refusal: ServerRefusal, content: bytes) -> FleetError:
        if refusal.status in NO_CREDIT:
            return FleetDownError(str(refusal))
        if refusal.status in NO_KEY:
            return self._no_key(refusal)
        if refusal.status == 404:
            return FleetSettingsError(_no_model(refusal, await self.list_models(), self.config))
        if not self.num_answers:
            self._refused.add(content)
        if self.num_answers or len(self._refused) < MAX_REFUSED:
            return refusal
        return FleetSettingsError(
            f"{self.config.url} refused each of the first {MAX_REFUSED} requests to "
            f"{self.config.model}. The last: {refusal}"
        )

    def _no_key(self, refusal: ServerRefusal) -> FleetSettingsError:
        url = self.config.url
        return FleetSettingsError(
            f"{url} refuses the key, or wants one: {refusal} {self._key_hint}"
        )

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.num_answers += 1
        usage = read_usage(answer)
        if usage is None:
            self.num_unreported += 1
        else:
            self.num_prompt_tokens += usage.prompt_tokens
            self.num_completion_tokens += usage.completion_tokens


@asynccontextmanager
async def open_api(
    config: ExternalConfig, *, api_key: str | None = None, key_hint: str = ""
) -> AsyncIterator[Api]:
    """Connect. Without `api_key`, the environment must hold the key in `api_key_env`. `key_hint` is
    the remedy for a refused key."""
    key = api_key
    if key is None:
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if api_key is None and config.api_key_env and not key:
        raise ConfigError(
            f"{config.url} needs a key, and {config.api_key_env} is not set: export it, or name "
            'another variable in api_key_env; write api_key_env: "" for a server without a key.'
        )
    if not key_hint and config.api_key_env:
        key_hint = f"The key came from {config.api_key_env}: export another one."
    elif not key_hint:
        key_hint = "Name the environment variable that holds the key in api_key_env."
    limits = _limiter(config.requests_per_minute), _limiter(config.tokens_per_minute)
    async with open_session() as session:
        client = Client(config.url, session=session, config=config.client, api_key=key, kind="API")
        api = Api(client, config=config, limits=limits, key_hint=key_hint)
        with contextlib.closing(api):
            yield api


def _no_model(refusal: ServerRefusal, names: Sequence[str], config: ExternalConfig) -> str:
    model, said = config.model, f"{str(refusal).rstrip('.')}."
    if not names:
        return f"{said} Is {config.url} all that comes before /chat/completions, mostly with /v1?"
    if model in names:
        return said
    hint = did_you_mean(model, names, cutoff=0.4)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = ", ".join(names[:MAX_NAMES])
    return f"{said} {config.url} has no model {model!r}; it lists {listed}{more}.{hint}"


def read_usage(answer: Mapping[str, Any]) -> TokenUsage | None:
    """Return the token counts an answer reports; None if it reports no numbers."""
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, new = counts.get("prompt_tokens"), counts.get("completion_tokens")
    if type(prompt) is not int or type(new) is not int or prompt < 0 or new < 0:
        return None
    return TokenUsage(prompt_tokens=prompt, completion_tokens=new)


def _limiter(per_minute: float | None) -> "AsyncLimiter | None":
    if per_minute is None:
        return None
    try:
        from aiolimiter import AsyncLimiter
    except ImportError as error:
        raise ConfigError(
            "External APIs need rate limits: pip install 'aiolimiter>=1.2'."
        ) from error
    return AsyncLimiter(per_minute, MINUTE_S)
