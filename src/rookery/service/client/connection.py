"""The connection to a service: requests with their retries, results, the session.

Every request that changes something has a number, so that one whose answer was lost is sent again
and done once. A service that is killed and started again is waited for.
"""

import asyncio
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import Field

from rookery.concurrency import task_group
from rookery.config import Config
from rookery.errors import ServiceError
from rookery.runtime.retry import Backoff

__all__ = ["Answer", "Connection", "ServiceClientConfig", "ServiceRefusal", "open_connection"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
POLL_S = 60.0
"""How long the service may be silent; it answers a poll within 45 s. Weights take as long as they
take."""
_RETRY = Backoff(first_s=0.1, longest_s=5.0)
_AGAIN = frozenset({408, 429})


class ServiceClientConfig(Config):
    """A service, and the base model of it."""

    url: str = "http://127.0.0.1:8000"
    api_key: str = ""
    """As `rookery keys add` printed it; by default that of TINKER_API_KEY."""
    model: str = ""
    """The name of the base model; by default the service's first."""
    away_s: float = Field(default=300.0, ge=0)
    """How long a service that does not answer is waited for."""
    in_flight: int = Field(default=256, ge=1)
    """Samples that wait for their results at the same time."""


class ServiceRefusal(ServiceError):
    """The service understood and said no."""

    def __init__(self, sentence: str, *, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class _Away(Exception):
    """Nothing was answered, or that it is too much now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status below 400, or 408, and what came with it."""

    status: int
    content: bytes
    content_type: str

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.content) if self.content else {}
        return document


class Connection:
    """One session. Made by `open_connection`."""

    def __init__(self, http: aiohttp.ClientSession, config: ServiceClientConfig) -> None:
        self._http = http
        self._config = config
        self.session_id = ""
        self._numbers = itertools.count()
        self.turns = asyncio.Semaphore(config.in_flight)
        """Held by samples while they wait, filled by callers and drained by answers; requests of
        models go in the order of their numbers and must not wait for one another here."""

    def next_number(self) -> int:
        """For models, sampling sessions and samples of this session."""
        return next(self._numbers)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a JSON request."""
        return (await self.request("POST", path, json.dumps(body).encode())).document()

    async def submit(self, path: str, body: Mapping[str, Any], *, accept: str = "") -> Answer:
        """The result of a request that takes its turn."""
        reply = await self.post(path, body)
        return await self._result(str(reply["request_id"]), accept=accept)

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, accept: str = ""
    ) -> Answer:
        """One request, sent again while the service is away."""
        url = path if path.startswith("http") else f"{self._config.url.rstrip('/')}/api/v1/{path}"
        try:
            return await _RETRY.persist(
                lambda: self._send(method, url, body, accept),
                on=_Away,
                limit_s=self._config.away_s,
            )
        except _Away as away:
            raise ServiceError(
                f"The service at {self._config.url} did not take a request for "
                f"{self._config.away_s:g} s: {away}. Is it running?"
            ) from away

    async def delete(self, path: str) -> None:
        """Delete something; nothing when it is gone, as after an answer that was lost."""
        try:
            await self.request("DELETE", path)
        except ServiceRefusal as refusal:
            if refusal.status != 404:
                raise

    async def _result(self, request_id: str, *, accept: str) -> Answer:
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            answer = await self.request("POST", "retrieve_future", body, accept=accept)
            if answer.status != 408:
                return answer

    async def _send(self, method: str, url: str, body: bytes | None, accept: str) -> Answer:
        headers = {"content-type": "application/json", "accept": accept or "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=POLL_S, sock_read=POLL_S)
        try:
            async with self._http.request(
                method, url, data=body, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
                status, kind = response.status, response.content_type
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Away(" ".join(str(error).split()) or type(error).__name__) from error
        if status < 400 or (status == 408 and url.endswith("/retrieve_future")):
            return Answer(status, content, kind)
        sentence = _sentence(content)
        if status in _AGAIN or status >= 500:
            raise _Away(f"{status}: {sentence}")
        raise ServiceRefusal(sentence, status=status)

    async def finish(self) -> None:
        """Tell the service once; it ends silent sessions by itself."""
        url = f"{self._config.url.rstrip('/')}/api/v1/sessions/{self.session_id}/finish"
        try:
            await self._send("POST", url, b"{}", "")
        except (_Away, ServiceError) as error:
            logger.info("The session was not finished: %s", error)

    async def beat(self) -> None:
        """Keep the session alive, until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.post("session_heartbeat", {"session_id": self.session_id})
            except ServiceError as error:
                logger.warning("The heartbeat of the session failed: %s", error)


@asynccontextmanager
async def open_connection(config: ServiceClientConfig) -> AsyncIterator[Connection]:
    """A session with the service, ended with the block."""
    key = config.api_key or os.environ.get("TINKER_API_KEY", "")
    headers = {"x-api-key": key} if key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        connection = Connection(http, config)
        connection.session_id = (await connection.post("create_session", {}))["session_id"]
        async with task_group() as group:
            beating = group.create_task(connection.beat())
            try:
                yield connection
            finally:
                beating.cancel()
                await connection.finish()


def _sentence(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        document = json.loads(text)
        text = str(document["error"])
    except (ValueError, TypeError, LookupError):
        pass
    return " ".join(text.split())[:1000]
