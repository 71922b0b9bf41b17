"""Batches for a training, from the gateway in this process or from one elsewhere."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
from pydantic import TypeAdapter, ValidationError

from rookery.compat.atropos.engine_side import Drawn, EngineSide
from rookery.compat.atropos.gateway import Gateway
from rookery.compat.atropos.group_queue import QueuedGroup
from rookery.compat.atropos.programs import Programs
from rookery.compat.atropos.registry import TrainerRegistration
from rookery.compat.atropos.scored_group import ScoredGroup, check_group
from rookery.errors import TaskError
from rookery.runtime.retry import Backoff
from rookery.types import ModelRef

__all__ = [
    "ClientFeed",
    "FedBatch",
    "FedGroup",
    "Feed",
    "GatewayClient",
    "GatewayFeed",
    "open_client",
]

# A gateway or a `run-api` elsewhere, asked by a trainer.
#
#     async with open_client(url) as client:
#         await client.register(registration)
#         number, groups = await client.batch(after=3)
#
# A gateway of Rookery gives a batch until the next question names it; a `run-api` gives it once.


REQUEST_S = 120.0
RETRY_S = 60.0
"""How long a gateway that does not answer is asked again: it may be started anew."""
_RETRY = Backoff(first_s=0.1, longest_s=5.0)
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
        answer = await _RETRY.persist(
            lambda: self._ask("POST", "/register", document), on=_Busy, limit_s=RETRY_S
        )
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
            raise TaskError(f"Could not parse the batch from {self._url}: {error}") from error
        return int(answer.get("batch_id", after + 1)), groups

    async def _next(self, after: int) -> dict[str, Any]:
        return await self._ask("GET", f"/batch?after={after}&trainer={self._number}", None)

    async def _ask(self, method: str, path: str, document: Any) -> dict[str, Any]:
        return await _RETRY.persist(
            lambda: self._once(method, path, document), on=_LOST, limit_s=RETRY_S
        )

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


LOOK_S = 0.5
"""How often a run whose own programs have ended looks who else plays."""
TELL_S = 30.0
"""How often a run that waits for a batch says how far it is."""
MANY = 4
"""Batches' worth of answers without a group: the environments send none on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedGroup:
    """One group, who sent it, and how it was drawn where that is known."""

    number: int
    """No two groups of a run have the same."""
    environment: str
    group: ScoredGroup
    draws: tuple[Drawn | None, ...]
    error: str = ""
    """Why it cannot be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBatch:
    """The groups of one step."""

    number: int
    groups: tuple[FedGroup, ...]


@dataclass(frozen=True, slots=True)
class _Begun:
    """When a batch was asked for, and what the engine had done until then."""

    time_s: float
    num_answers: int
    num_tokens: int


class Feed(Protocol):
    """Where a training gets its batches from."""

    def use(self, ref: ModelRef, *, step: int) -> None:
        """The policy that answers from now on, after so many steps."""
        ...

    async def take(self, step: int, *, after: int) -> FedBatch:
        """The batch that follows number `after`, for a step; TaskError when none comes."""
        ...

    async def acknowledge(self, batch: FedBatch) -> None:
        """It is durable where it is trained on."""
        ...


class GatewayFeed:
    """The gateway of this process."""

    def __init__(
        self,
        gateway: Gateway,
        side: EngineSide,
        *,
        programs: Programs,
        limit_s: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`say` is told how far a batch is that takes long."""
        self._gateway = gateway
        self._side = side
        self._programs = programs
        self._limit_s = limit_s
        self._say = say
        self._taken: dict[int, Sequence[QueuedGroup]] = {}

    def use(self, ref: ModelRef, *, step: int) -> None:
        self._side.use(ref, step=step)
        self._gateway.step = step

    async def take(self, step: int, *, after: int) -> FedBatch:
        gateway = self._gateway
        gateway.is_started, gateway.step = True, step
        trainer = gateway.registry.trainer
        assert trainer is not None, "the run registered itself"
        batch = await self._before_the_end(trainer.batch_size)
        self._taken[after + 1] = batch
        return FedBatch(number=after + 1, groups=tuple(self._fed(queued) for queued in batch))

    def _fed(self, queued: QueuedGroup) -> FedGroup:
        env_id = queued.group.env_id
        name = "" if env_id is None else self._gateway.registry.find(env_id).name
        return FedGroup(number=queued.seq, environment=name, group=queued.group, draws=queued.draws)

    async def _before_the_end(self, num_sequences: int) -> Sequence[QueuedGroup]:
        """A batch, or why there will be none."""
        taking = asyncio.create_task(self._gateway.queue.take(num_sequences))
        ended = asyncio.create_task(self._nobody_is_left())
        began = _Begun(time.monotonic(), self._side.num_answers, self._side.num_tokens)
        telling = asyncio.create_task(self._tell(began, num_sequences))
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait({taking, ended}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise TaskError(
                f"No batch of {num_sequences} sequences came together in {self._limit_s:g} s "
                f"(environment.batch_s): {self._state()}; {self._pace(began, num_sequences)}."
            ) from None
        finally:
            for task in (taking, ended, telling):
                task.cancel()
        if taking.done() and not taking.cancelled():
            return taking.result()
        raise TaskError(f"No environment is left: {ended.result()}. {self._state()}.")

    async def _tell(self, began: "_Begun", num_sequences: int) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._say(f"waiting for a batch: {self._pace(began, num_sequences)}")

    def _pace(self, began: "_Begun", num_sequences: int) -> str:
        """How far the batch is, and what the engine does meanwhile."""
        took_s = time.monotonic() - began.time_s
        num = sum(group.size for group in self._gateway.queue.groups)
        answers = self._side.num_answers - began.num_answers
        speed = (self._side.num_tokens - began.num_tokens) / max(took_s, 1e-3)
        said = f"{num} of {num_sequences} sequences have come in {took_s:.0f} s, of "
        said += f"{answers} answers of the engine ({speed:.0f} tokens/s)"
        if 0 < num < num_sequences:
            said += f"; the rest takes about {took_s * (num_sequences - num) / num:.0f} s"
        elif not num and answers >= MANY * num_sequences:
            said += "; most environments send no group whose answers are all worth the same"
        return said

    async def _nobody_is_left(self) -> str:
        """What the last program of this run said, when those that others started are silent too:
        nothing tells them apart, and few that end say so."""
        said = await self._programs.ended()
        while self._live:  # noqa: ASYNC110 - nobody tells that an environment is silent
            await asyncio.sleep(LOOK_S)
        return said

    @property
    def _live(self) -> list[str]:
        registry = self._gateway.registry
        return [e.name for e in registry.environments if registry.is_live(e)]

    def _state(self) -> str:
        gateway, live = self._gateway, self._live
        groups, buffered = gateway.queue.groups, gateway.queue.buffered_sizes
        said = (
            f"{len(groups)} groups of {sum(group.size for group in groups)} sequences wait, and "
            f"the environments are {', '.join(live) or 'none'}"
        )
        if buffered:
            said += (
                f"; {len(buffered)} groups of {min(buffered)} to {max(buffered)} sequences do not "
                "make up the group_size that their environment registered"
            )
        if gateway.num_refused:
            said += f"; {gateway.num_refused} times groups were refused, the last time: "
            said += gateway.last_refusal.rstrip(".")
        return said

    async def acknowledge(self, batch: FedBatch) -> None:
        await self._gateway.queue.acknowledge(self._taken.pop(batch.number))


class ClientFeed:
    """A gateway or a `run-api` elsewhere. The next question acknowledges a batch."""

    def __init__(
        self, client: GatewayClient, *, vocab_size: int, max_tokens: int, limit_s: float
    ) -> None:
        """`max_tokens`: of a sequence. A `run-api` passes on what is longer."""
        self._client = client
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._limit_s = limit_s

    def use(self, ref: ModelRef, *, step: int) -> None:
        """Environments ask an engine that is not known here."""

    async def take(self, step: int, *, after: int) -> FedBatch:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                number, groups = await self._client.batch(after=after)
        except TimeoutError:
            if not limit.expired():  # the gateway's own: it does not answer
                raise
            raise TaskError(
                f"No batch came in {self._limit_s:g} s (environment.batch_s): look at the "
                "environments of the gateway."
            ) from None
        fed = [self._fed((step << 20) + place, group) for place, group in enumerate(groups)]
        return FedBatch(number=number, groups=tuple(fed))

    def _fed(self, number: int, group: ScoredGroup) -> FedGroup:
        error = ""
        try:
            check_group(group, vocab_size=self._vocab_size, max_tokens=self._max_tokens)
        except TaskError as refused:
            error = str(refused)
        name = "" if group.env_id is None else f"environment_{group.env_id}"
        draws = (None,) * group.size
        return FedGroup(number=number, environment=name, group=group, draws=draws, error=error)

    async def acknowledge(self, batch: FedBatch) -> None:
        """Done by the next question."""
