"""The one connection to an external OpenAI-compatible API: its key, rate limits and retries.

    async with open_api(ExternalConfig(url="https://api.example.com/v1", model="big")) as api:
        async with api.call():
            answer = await api.ask("/v1/chat/completions", body, cost=1200)

| what goes wrong                                      | is raised      | and then               |
|------------------------------------------------------|----------------|------------------------|
| no connection, busy for `busy_s`, key, credit, model | FleetDownError | nobody can be served   |
| 500 to 599 otherwise                                 | ServerLost     | sent again once        |
| no answer in time                                    | ServerLost     |                        |
| 400 to 499 otherwise                                 | ServerRefusal  |                        |
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import ConfigError, FleetDownError, FleetError
from rookery.fleet.http.client import (
    Client,
    ClientConfig,
    ServerBusy,
    ServerLost,
    ServerRefusal,
    open_session,
)
from rookery.types import TokenUsage

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

__all__ = ["Api", "ExternalConfig", "api_root", "open_api", "read_usage"]

MINUTE_S = 60.0
NO_REQUEST = frozenset({401, 402, 403, 404, 429})
"""Refusals of everybody: no key or one without rights, no credit (a 429 that waiting does not
help), no such model."""
NO_KEY = frozenset({401, 403})
CHECK_S = 10.0


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
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the API calls the limit of an answer. Models that know only `max_completion_tokens`
    (OpenAI's reasoning models) refuse temperature and top_p: they are left out."""
    reasoning_effort: str | None = None
    """Sent as it is, where set."""
    takes_seed: bool = True
    """False: the API refuses requests with a seed."""
    client: ExternalClientConfig = ExternalClientConfig()


class Api:
    """One API under its limits; counts what it was paid. `open_api` makes one."""

    def __init__(
        self,
        client: Client,
        *,
        config: ExternalConfig,
        limits: "tuple[AsyncLimiter | None, AsyncLimiter | None]",
    ) -> None:
        self.config = config
        self.num_answers = 0
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_unreported = 0
        """Answers without a report of their tokens: the two sums leave them out."""
        self._client = client
        self._requests, self._tokens = limits
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

    async def check_key(self, path: str) -> None:
        """Raise a ConfigError if the API refuses the key, or wants one. Asks for its list of
        models, so no model is called; an API that does not answer is left for later."""
        try:
            async with asyncio.timeout(CHECK_S):
                await self._client.get(path)
        except ServerRefusal as refusal:
            if refusal.status in NO_KEY:
                raise ConfigError(
                    f"{self.config.url} refuses the key, or wants one: {refusal}"
                ) from refusal
        except (ServerLost, TimeoutError):
            return

    async def _post(self, path: str, content: bytes, admit: Callable[[], Any]) -> Any:
        limit_s = self.config.client.request_s
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

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.num_answers += 1
        usage = read_usage(answer)
        if usage is None:
            self.num_unreported += 1
        else:
            self.num_prompt_tokens += usage.prompt_tokens
            self.num_completion_tokens += usage.completion_tokens


@asynccontextmanager
async def open_api(config: ExternalConfig, *, api_key: str | None = None) -> AsyncIterator[Api]:
    """Connect. Where no key is given, that of `api_key_env` must be in the environment."""
    key = api_key
    if key is None:
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if api_key is None and config.api_key_env and not key:
        raise ConfigError(
            f"{config.url} needs a key, and {config.api_key_env} is not set: export it, or name "
            'another variable in api_key_env; write api_key_env: "" for a server without a key.'
        )
    limits = _limiter(config.requests_per_minute), _limiter(config.tokens_per_minute)
    async with open_session() as session:
        client = Client(config.url, session=session, config=config.client, api_key=key)
        with contextlib.closing(Api(client, config=config, limits=limits)) as api:
            yield api


def api_root(config: ExternalConfig) -> str:
    """What the paths of requests begin with.

    Clients take a URL without /v1. Some APIs have another path, such as /v1beta/openai.
    """
    return "/v1" if config.url.rstrip("/").endswith("/v1") else ""


def read_usage(answer: Mapping[str, Any]) -> TokenUsage | None:
    """The tokens that an answer reports as its cost; None when it does not, or not in numbers."""
    usage = answer.get("usage")
    found = usage if isinstance(usage, dict) else {}
    prompt, new = found.get("prompt_tokens"), found.get("completion_tokens")
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
