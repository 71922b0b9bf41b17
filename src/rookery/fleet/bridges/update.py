"""New base weights for all servers of a fleet, each proved by the canary before it takes requests.

    update = BaseUpdate(fleet, canary)
    await update.publish(give, expected, ref)

`give` puts the weights into one server. A server that fails takes no requests; one that is started
again later is given the newest weights, and takes requests when it has shown that it has them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rookery.errors import FleetError, RookeryError
from rookery.fleet.bridges.canary import Canary
from rookery.fleet.fleet import Fleet
from rookery.fleet.routing.replica import Replica
from rookery.types import ModelRef

__all__ = ["BaseUpdate", "Give", "first_wrong"]

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


async def _unexplained(_: Replica) -> str:
    return ""


class BaseUpdate:
    """The weights that a fleet's servers should have. One update at a time."""

    def __init__(self, fleet: Fleet, canary: Canary, *, explain: Explain = _unexplained) -> None:
        self._fleet = fleet
        self._canary = canary
        self._explain = explain
        self._newest: _Newest | None = None
        self._lock = asyncio.Lock()
        for replica in fleet.pool.replicas:
            replica.renew = self._renew

    async def publish(
        self, give: Give, expected: Sequence[float], ref: ModelRef, *, again: Give
    ) -> float:
        """Give all servers the weights; the largest difference seen afterwards, in nats.

        `again` is for a server that is started later. `fleet.base` is `ref` then. FleetError when a
        server failed that took requests before: the others go on with the new weights.
        """
        async with self._lock:
            newest = self._newest = _Newest(again, expected, ref)
            replicas = self._fleet.pool.replicas
            were_up = [not r.is_given_up and not r.breaker.is_open for r in replicas]
            outcomes = await asyncio.gather(*(self._update(r, give, newest) for r in replicas))
        succeeded = [outcome for outcome in outcomes if isinstance(outcome, float)]
        if succeeded:
            self._fleet.rename_base(ref)
        failed = [
            outcome
            for outcome, was_up in zip(outcomes, were_up, strict=True)
            if isinstance(outcome, RookeryError) and (was_up or not succeeded)
        ]
        if failed:
            others = "the others go on with them" if succeeded else "no server takes requests"
            raise FleetError(
                f"{len(failed)} of {len(replicas)} servers did not get the new weights, {others}: "
                f"{failed[0]}"
            )
        return max(succeeded)

    async def _renew(self, replica: Replica) -> None:
        """A server that was started again has its first weights: give it the newest."""
        async with self._lock:
            newest = self._newest
            if newest is not None and not await replica.is_updated():
                await self._update(replica, newest.again, newest)

    async def _update(self, replica: Replica, give: Give, newest: _Newest) -> float | RookeryError:
        """How far one server is off afterwards, or why it takes no requests any more."""
        replica.exclude(f"{replica.url} was given new weights, and did not confirm them.")
        try:
            await give(replica)
            gap = await self._canary.gap(replica, newest.expected, newest.ref)
            if self._canary.is_far(gap):
                raise FleetError(await self._complaint(replica, gap))
            await replica.include()
        except RookeryError as error:
            replica.exclude(str(error))
            logger.warning("%s takes no requests: %s", replica.url, error)
            return error
        return gap

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


def first_wrong(found: Sequence[Mapping[str, int]], expected: Mapping[str, int]) -> str:
    """The first weight whose sum is wrong, given the sums of every worker: their total, or all of
    them where each has the whole."""
    for name, right in expected.items():
        sums = [own[name] for own in found if name in own]
        if sums and sum(sums) != right and any(own != right for own in sums):
            return f"The first weight that differs is {name}."
    return ""
