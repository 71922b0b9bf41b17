"""New base weights for all servers of a fleet, each proved by the canary before it takes requests.

    update = BaseUpdate(fleet, canary)
    async with update.lock:
        await update.publish(give, logprobs, ref, again=give)

`give` puts the weights into one server. A server that fails takes no requests; one that is lost, or
started again later, is given the newest weights when it is back, and takes requests when it has
shown that it has them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rookery.concurrency import run_to_end, together
from rookery.errors import FleetError, RookeryError
from rookery.fleet.bridges.canary import Canary, Logprobs
from rookery.fleet.fleet import Fleet
from rookery.fleet.http.client import ServerLost
from rookery.fleet.routing.paused import VERSION
from rookery.fleet.routing.replica import Replica
from rookery.types import ModelRef

__all__ = [
    "PAUSE",
    "PAUSE_ROUTE",
    "BaseUpdate",
    "Give",
    "first_wrong",
    "paused",
    "resume",
    "resume_all",
]

# Servers that compute nothing while their weights change.
#
# async with paused(replicas):
#     model.set_weights(weights)                       # memory that the servers compute with


PAUSE_ROUTE = "/pause"
PAUSE = f"{PAUSE_ROUTE}?mode=keep"
"""vLLM then forgets cached prefixes too; what is in flight is computed anew from its prompt."""


@asynccontextmanager
async def paused(replicas: Sequence[Replica]) -> AsyncIterator[None]:
    """None of these computes inside the block, and what one has cached is forgotten: requests of
    others may be in flight while weights are written."""
    try:
        await together(replica.client.post(PAUSE, b"") for replica in replicas)
        yield
    except BaseException:  # whatever it was: what waits at the servers goes on
        await run_to_end(resume_all(replicas))
        raise
    for answer in await run_to_end(resume_all(replicas)):
        if isinstance(answer, BaseException):
            raise answer


async def resume(replica: Replica) -> None:
    await replica.client.post("/resume", b"")


async def resume_all(replicas: Sequence[Replica]) -> list[Any]:
    """One that cannot be told does not keep the others; an answer or an error of each."""
    return await asyncio.gather(*map(resume, replicas), return_exceptions=True)


logger = logging.getLogger(__name__)

Give = Callable[[Replica], Awaitable[None]]
"""Puts the newest weights into one server."""
Explain = Callable[[Replica], Awaitable[str]]
"""Which weight of a server is not what it should be, as the end of a sentence; empty: none."""


@dataclass(frozen=True, slots=True)
class _Newest:
    again: Give
    expected: Sequence[float]
    ref: ModelRef


@dataclass(frozen=True, slots=True)
class _Read:
    process: str
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A canary that waits at a paused server."""

    process: str
    answer: asyncio.Task[Sequence[float]]


async def _unexplained(_: Replica) -> str:
    return ""


class BaseUpdate:
    """The weights that a fleet's servers should have. One update at a time."""

    def __init__(
        self,
        fleet: Fleet,
        canary: Canary,
        *,
        explain: Explain = _unexplained,
        can_renew: bool = True,
    ) -> None:
        """`can_renew`: the weights are still there for a server that is lost when it is back."""
        self._fleet = fleet
        self._can_renew = can_renew
        self._canary = canary
        self._explain = explain
        self._newest: _Newest | None = None
        self._asked: dict[Replica, _Asked] = {}
        self.lock = asyncio.Lock()
        """Held while weights change: a server that comes back meanwhile gets them afterwards."""
        for replica in fleet.pool.replicas:
            replica.renew = self._renew

    async def ask_ahead(self, replica: Replica) -> None:
        """Send the canary to a server that is paused: it is read when the server goes on, without
        a wait for its way there. The caller holds the lock, and publishes or forgets it."""
        process = await replica.proof.running()
        if self._newest is None or replica.proof.is_by(process):
            answer = asyncio.create_task(self._canary.read(replica, replica.base))
            self._asked[replica] = _Asked(process, answer)

    async def forget_asked(self) -> None:
        """Nobody reads the canaries that were sent ahead."""
        answers = [asked.answer for asked in self._asked.values()]
        self._asked.clear()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def publish(
        self, give: Give, logprobs: Logprobs, ref: ModelRef, *, again: Give
    ) -> float | None:
        """Give all servers the weights; the largest difference seen afterwards, in nats. None: all
        servers are lost, and get the weights before they take requests again.

        `logprobs` computes with them, while the servers do. `again` is for a server that was
        started since the last time. `fleet.base` is `ref` then. FleetError when a server failed
        that took requests before: the others go on with the new weights. The caller holds the lock.
        """
        replicas = self._fleet.pool.replicas
        were_up = [not r.is_given_up and not r.breaker.is_open for r in replicas]
        either = give if self._newest is None else _for_either(give, again)
        computing = asyncio.ensure_future(logprobs(self._canary))
        try:
            read = await asyncio.gather(
                *(self._read(r, give if r in self._asked else either, ref) for r in replicas)
            )
            newest = self._newest = _Newest(again, await computing, ref)
        finally:
            computing.cancel()
            await self.forget_asked()
        outcomes = await asyncio.gather(
            *(self._judge(r, one, newest) for r, one in zip(replicas, read, strict=True))
        )
        proved = [r for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, float)]
        if proved or None in outcomes:
            self._fleet.rename_base(ref)
        for replica in proved:  # only now: a request names the base model as the fleet does
            replica.include()
        failed = [
            outcome
            for outcome, was_up in zip(outcomes, were_up, strict=True)
            if isinstance(outcome, RookeryError) and (was_up or not proved)
        ]
        if failed:
            others = "the others go on with them" if proved else "no server takes requests"
            raise FleetError(
                f"{len(failed)} of {len(replicas)} servers did not get the new weights, {others}: "
                f"{failed[0]}"
            )
        return max((outcome for outcome in outcomes if isinstance(outcome, float)), default=None)

    async def name(self, replica: Replica, ref: ModelRef) -> None:
        """A server has these weights, and can say which of them drew a token."""
        if replica.local is None:
            await replica.mark(ref.version)
        elif VERSION in replica.capabilities.routes:
            await replica.client.post_json(VERSION, {"new_version": ref.version})
        replica.base = ref

    async def _renew(self, replica: Replica) -> None:
        """A server that was started again has its first weights: give it the newest."""
        async with self.lock:
            newest = self._newest
            if newest is None or await replica.proof.is_current():
                return
            read = await self._read(replica, newest.again, newest.ref)
            if isinstance(await self._judge(replica, read, newest), float):
                replica.include()

    async def _read(self, replica: Replica, give: Give, ref: ModelRef) -> _Read | RookeryError:
        """What one server says when it has been given the weights; it takes no requests."""
        replica.exclude(f"{replica.url} was given new weights, and did not confirm them.")
        try:
            if not replica.is_marked:
                await replica.mark(ref.version)
            await give(replica)
            asked = self._asked.pop(replica, None)
            if asked is not None:
                # A change may take longer than a request may wait: it is asked again then.
                with contextlib.suppress(ServerLost):
                    return _Read(asked.process, await asked.answer)
            process = await replica.proof.running()
            if replica.base != ref:
                await self.name(replica, ref)
            return _Read(process, await self._canary.read(replica, ref))
        except RookeryError as error:
            return error

    async def _judge(
        self, replica: Replica, read: _Read | RookeryError, newest: _Newest
    ) -> float | RookeryError | None:
        """How far one server is off, or why it takes no requests any more; None: it is lost, and is
        asked again when it is back."""
        try:
            if isinstance(read, RookeryError):
                raise read
            gap = self._canary.gap(read.logprobs, newest.expected)
            if self._canary.is_far(read.logprobs, newest.expected):
                raise FleetError(await self._complaint(replica, gap))
        except RookeryError as error:
            replica.exclude(str(error))
            if await self._is_lost(replica, error):
                replica.proof.withdraw()
                self._fleet.pool.suspect(replica, str(error))
                return None
            logger.warning("%s takes no requests: %s", replica.url, error)
            return error
        replica.proof.note(read.process)
        return gap

    async def _is_lost(self, replica: Replica, error: RookeryError) -> bool:
        """Whether the server may come back: it is not there, or its engine is dead. One that is
        well and answers with an error would do so again."""
        if not isinstance(error, ServerLost) or replica.is_given_up or not self._can_renew:
            return False
        return error.is_broken or not await replica.client.is_healthy()

    async def _complaint(self, replica: Replica, gap: float) -> str:
        why = await self._explain(replica) or (
            "All its weights are the right ones, so it computes with others than it shows: keys "
            "and values cached for older weights, or packed copies (vLLM on the CPU keeps the old "
            "output layer of models with tied embeddings unless launch.live_weights is true)."
        )
        return (
            f"{replica.url} took the new weights but computes with others: log-probabilities are "
            f"off by {gap:.2g} nats, more than {self._canary.limit_nats:g}. {why} Restart it."
        )


def _for_either(give: Give, again: Give) -> Give:
    """`again` for a server that is another process than the one that was proved."""

    async def choose(replica: Replica) -> None:
        await (again if await replica.proof.is_of_another() else give)(replica)

    return choose


def first_wrong(worker_sums: Sequence[Mapping[str, int]], expected: Mapping[str, int]) -> str:
    """The first weight whose sum is wrong, given the sums of every worker: their total, or all of
    them where each has the whole."""
    for name, right in expected.items():
        sums = [worker[name] for worker in worker_sums if name in worker]
        if sums and sum(sums) != right and any(total != right for total in sums):
            return f"The first weight that differs is {name}."
    return ""
