"""A gateway or a `run-api` elsewhere, asked by a trainer.

    async with open_client(url) as client:
        await client.register(registration)
        number, groups = await client.batch(after=3)

A gateway of Rookery gives a batch until the next question names it; a `run-api` gives it once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import stamina
from pydantic import TypeAdapter, ValidationError

from rookery.environments.atropos.registry import TrainerRegistration
from rookery.environments.atropos.scored_group import ScoredGroup
from rookery.errors import TaskError

__all__ = ["GatewayClient", "open_client"]

REQUEST_S = 120.0
RETRY_S = 60.0
"""How long a gateway that does not answer is asked again: it may be started anew."""
POLL_S = 0.2
ALIVE_S = 5.0
"""How often a gateway hears of a trainer, whose steps may take long: it refuses a second one."""
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What a gateway that is killed leaves of a question, before its answer or in the middle of it."""
_GROUPS = TypeAdapter(list[ScoredGroup])


class _Busy(TaskError):
    """Another trainer is at work there."""


class GatewayClient:
    """One gateway by its URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, key: str) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._registration: TrainerRegistration | None = None
        self._number = ""
        """Which trainer this is."""

    async def register(self, registration: TrainerRegistration) -> None:
        """TaskError when another trainer is at work there, and still is after a while: the one that
        this one goes on for may have been killed just now."""
        self._registration = registration
        document = registration.model_dump(mode="json")
        async for attempt in stamina.retry_context(on=_Busy, attempts=None, timeout=RETRY_S):
            with attempt:
                answer = await self._ask("POST", "/register", document)
        self._number = str(answer.get("uuid", ""))

    async def stay_known(self) -> None:
        """Let the gateway hear of this trainer, until cancelled. What it says to that, it says to
        the next question too."""
        while True:
            await asyncio.sleep(ALIVE_S)
            if self._number:
                with contextlib.suppress(TaskError, aiohttp.ClientError, TimeoutError):
                    await self._once("GET", f"/status?trainer={self._number}", None)

    async def batch(self, *, after: int) -> tuple[int, Sequence[ScoredGroup]]:
        """The batch that follows number `after`, waited for."""
        while True:
            answer = await self._next(after)
            if answer.get("status") == "error" and self._registration is not None:
                # It was started anew, and does not know its trainer.
                await self.register(self._registration)
                answer = await self._next(after)
            if answer.get("status") == "error":
                raise TaskError(f"{self._url} gives no batches: {answer.get('message')}")
            if answer.get("batch"):
                break
            await asyncio.sleep(POLL_S)
        try:
            groups = await asyncio.to_thread(_GROUPS.validate_python, answer["batch"])
        except ValidationError as error:
            raise TaskError(f"{self._url} gave a batch that is none: {error}") from error
        return int(answer.get("batch_id", after + 1)), groups

    async def _next(self, after: int) -> dict[str, Any]:
        return await self._ask("GET", f"/batch?after={after}&trainer={self._number}", None)

    async def _ask(self, method: str, path: str, document: Any) -> dict[str, Any]:
        async for attempt in stamina.retry_context(on=_LOST, attempts=None, timeout=RETRY_S):
            with attempt:
                return await self._once(method, path, document)
        raise AssertionError("the retry loop ends by returning or raising")

    async def _once(self, method: str, path: str, document: Any) -> dict[str, Any]:
        async with self._session.request(
            method,
            self._url + path,
            json=document,
            headers=self._headers,
            allow_redirects=False,
        ) as response:
            if response.status >= 300:
                said = response.headers.get("Location", "") or (await response.text())[:500]
                kind = _Busy if response.status == HTTPStatus.CONFLICT else TaskError
                raise kind(f"{self._url}{path} refused ({response.status}): {said}")
            answer: dict[str, Any] = await response.json()
            return answer


@asynccontextmanager
async def open_client(url: str, *, key: str = "") -> AsyncIterator[GatewayClient]:
    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        client = GatewayClient(url, session, key=key)
        known = asyncio.create_task(client.stay_known())
        try:
            yield client
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"nothing came in {REQUEST_S:g} s"
            raise TaskError(
                f"The gateway at {url} does not answer: {why}. Start it with `rookery grpo "
                "gateway` or `run-api`, or correct environment.url."
            ) from error
        finally:
            known.cancel()
            await asyncio.gather(known, return_exceptions=True)
