"""Current state of servers and of a service, which run folders do not hold.

    await read_fleet(())                            # the servers that this user started
    link = ServiceLink("http://127.0.0.1:8000")
    await link.sample(key="tml-...", model="base", prompt="2 + 2 =", max_tokens=16)

Only `sample` causes computation, for the tenant of the given key. Keys are not stored.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from rookery.errors import RookeryError, ServiceError
from rookery.fleet.admin import status
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.reports import ServiceStatus

__all__ = ["ServiceLink", "read_fleet"]

ANSWER_S = 5.0
SAMPLE_S = 120.0
MOST_CHECKPOINTS = 200


async def read_fleet(urls: Sequence[str]) -> dict[str, Any]:
    """State of each server, as in `rookery fleet status`; without URLs, of this user's servers."""
    return {"servers": [asdict(server) for server in await status(urls)]}


class ServiceLink:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def status(self) -> dict[str, Any]:
        """Queues, tenants and throughput. A service on another machine lists only its models."""
        answer: dict[str, Any] = {"url": self.url}
        try:
            async with asyncio.timeout(ANSWER_S):
                try:
                    document = await self._get("/status?format=json")
                except RookeryError as error:
                    reason, models = str(error), await self._get("/")
                    return answer | {"name": models.get("name", ""), "reason": reason}
        except (RookeryError, TimeoutError) as error:
            raise ServiceError(
                f"{self.url} does not answer: it is busy, or `rookery serve` does not run there."
            ) from error
        with self._answers():
            return answer | asdict(TypeAdapter(ServiceStatus).validate_python(document))

    async def models(self, *, key: str) -> dict[str, Any]:
        """Models that a tenant can sample from, and its checkpoints."""
        models, saved = await asyncio.gather(
            self._get("/v1/models", key=key),
            self._get(f"/api/v1/checkpoints?limit={MOST_CHECKPOINTS}", key=key),
        )
        with self._answers():
            names = [str(row["id"]) for row in models["data"]]
            return {"models": names, "checkpoints": [dict(row) for row in saved["checkpoints"]]}

    async def sample(
        self, *, key: str, model: str, prompt: str, max_tokens: int, temperature: float
    ) -> dict[str, Any]:
        """Sample one answer as text."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
        async with open_session() as session:
            client = self._client(session, key, seconds=SAMPLE_S)
            completion = await client.post_json(
                "/v1/completions", body | {"temperature": temperature}
            )
        with self._answers():
            choice = completion["choices"][0]
            reason, usage = choice.get("finish_reason"), completion.get("usage")
            return {"text": "" + choice["text"], "finish_reason": reason, "usage": usage}

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Turn an unexpected response into a ServiceError."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ServiceError(
                f"{self.url} does not answer as a service of Rookery: give the address that "
                "`rookery serve` printed."
            ) from error

    async def _get(self, path: str, *, key: str = "") -> dict[str, Any]:
        async with open_session() as session:
            answer = await self._client(session, key, seconds=ANSWER_S).get(path)
        return answer if isinstance(answer, dict) else {}

    def _client(self, session: Any, key: str, *, seconds: float) -> Client:
        limits = ClientConfig(connect_s=ANSWER_S, control_s=seconds)
        return Client(self.url, session=session, config=limits, api_key=key)
