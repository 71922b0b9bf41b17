"""The one connection to an external OpenAI-compatible API: its key, rate limits and retries.

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

from rookery.concurrency import together
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
from rookery.types import TokenIds, TokenUsage

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

__all__ = ["Api", "ExternalConfig", "open_api", "read_usage", "tokenize"]

# Texts as token ids, by a server's own tokenizer.
#
# [tokens] = await tokenize(client, ["Once upon a time"])


NUM_CALLS = 32
"""Texts on their way at the same time: `/tokenize` takes one a call, and most of it is waiting."""


async def tokenize(client: Client, prompts: Sequence[str | Sequence[int]]) -> list[TokenIds]:
    """Each prompt's tokens, in order; those that are token ids already stay as they are."""
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
"""A 429 that is no busy server: an account may be topped up while a run waits."""
MAX_REFUSED = 3
"""Different requests that an API may refuse before it has answered any."""
CHECK_S = 10.0
MAX_NAMES = 8
"""Models of an API that a sentence names."""


class ExternalClientConfig(ClientConfig):
    """Time limits of requests to an API."""

    busy_s: float = Field(default=300.0, ge=0)
    """How long a request waits while the API answers 429 or 503; its Retry-After is kept. One that
    asks for more is given up at once."""


class ExternalConfig(Config):
    """An API that is not ours: it has a key, and limits."""

    rounding: ClassVar[None] = None
    type: Literal["external"] = "external"
    url: str
    """Up to and with /v1."""
    model: str
    """The name of the model at the API."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; empty: the API has none."""
    route: Literal["chat", "completions"] = "chat"
    """`completions` continues a text, `chat` answers it as one message of a user."""
    logprobs: bool = False
    """Ask for log-probabilities; some APIs refuse requests that do. Scoring labels needs them."""
    requests_per_minute: float | None = Field(default=100.0, ge=1)
    """None: no limit, for servers of one's own."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Prompt and new tokens together, as most providers count; none by default."""
    max_in_flight: int = Field(default=8, ge=1)
    """Requests at a time."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the API calls the limit of an answer. Models that know only `max_completion_tokens`
    (OpenAI's reasoning models) refuse temperature and top_p: they are left out."""
    reasoning_effort: str | None = None
    """Sent as it is, where set."""
    takes_seed: bool = True
    """False: the API refuses requests with a seed."""
    client: ExternalClientConfig = ExternalClientConfig()

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        check_url(url, named="url is")
        return url


class Api:
    """One API under its limits; counts what it was paid. `open_api` makes one."""

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
        """What the paths of requests begin with: clients take a URL without /v1, and some APIs
        have another path, such as /v1beta/openai."""
        self.num_answers = 0
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_unreported = 0
        """Answers without a report of their tokens: the two sums leave them out."""
        self._client = client
        self._key_hint = key_hint
        self._requests, self._tokens = limits
        self._refused: set[bytes] = set()
        """Requests that were refused before any was answered."""
        # Filled by every request, drained by its answer; bounds what the provider sees at once.
        self._in_flight = asyncio.Semaphore(config.max_in_flight)
        self._calls: set[asyncio.Timeout] = set()
        """Calls that wait; the timeout of each is when the connection closes, if not before."""
        self._is_closed = False

    def close(self) -> None:
        """Tell all who wait, at once."""
        self._is_closed = True
        for call in self._calls:
            call.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def call(self) -> AsyncIterator[asyncio.Timeout]:
        """A block that waits for answers; it ends when the connection is closed. TimeoutError when
        it sets itself a limit by the timeout it is given."""
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
        """One request of `cost` tokens within the limits, and the answer's JSON object.

        `is_wanted` is asked right before every attempt: FleetError when it says no.
        """
        if self._tokens is not None and cost > self._tokens.max_rate:
            raise FleetError(
                f"A request of {cost} tokens can never fit tokens_per_minute "
                f"{self._tokens.max_rate:g}: shorten the prompt, lower max_tokens or raise it."
            )
        content = json.dumps(body).encode()

        async def admit() -> None:
            # Those of requests come first: they are the scarcer.
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
        """The names of its models, none where it does not tell. FleetSettingsError if it refuses
        the key, or wants one; no model is called."""
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
        # Some list `models/NAME` and take NAME.
        return tuple(id.removeprefix("models/") for id in ids if isinstance(id, str))

    async def _post(self, path: str, content: bytes, admit: Callable[[], Any]) -> Any:
        limit_s = self.config.client.request_s
        try:
            # Every attempt counts: the provider counts those that it answers with 429 too.
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
    """Connect. Where no key is given, that of `api_key_env` must be in the environment. `key_hint`
    says what to do about a key that is refused."""
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
    """The tokens that an answer reports as its cost; None when it does not, or not in numbers."""
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
