"""Batches for a trainer elsewhere: each is given until it is acknowledged.

The Atropos API has no acknowledgement. A trainer that knows none acknowledges a batch by asking for
the next one; Rookery's own names the last batch that it has (`/batch?after=3`). The first question
of a trainer that has just registered acknowledges nothing: what the one before was given may have
been lost with it.

What a batch holds is durable before it is given: a trainer that has it may acknowledge it to the
gateway's next process.
"""

import asyncio
from collections.abc import Sequence

from rookery.environments.atropos.gateway import Gateway
from rookery.environments.atropos.group_queue import QueuedGroup
from rookery.runs import Run

__all__ = ["Delivery", "trained_groups"]

BATCH, GIVEN = "batch", "given"
"""Events: acknowledged, and given to a trainer."""


def trained_groups(run: Run) -> set[int]:
    """The numbers of all groups that durable batches of the run hold."""
    return {int(seq) for event in run.events(BATCH) for seq in event.payload.get("groups", ())}


class Delivery:
    """The batches of one gateway, one at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        last = gateway.run.last(BATCH)
        self._number = 0 if last is None else int(last.key)
        """Of the newest batch that was acknowledged."""
        self._given: Sequence[QueuedGroup] = []
        given = gateway.run.last(GIVEN)
        if given is not None and int(given.key) == self._number + 1:
            self._given = gateway.queue.take_these(given.payload["groups"])
        gateway.step = self._number + bool(self._given)
        self._is_new = False
        """Whether a trainer has registered that has not asked yet."""
        self._lock = asyncio.Lock()

    def begin(self) -> None:
        """A trainer has registered."""
        self._is_new = True

    async def next(self, after: int | None) -> tuple[int, Sequence[QueuedGroup]]:
        """The batch that follows number `after`, empty when there is none yet; without a number,
        the one that follows what was given last."""
        trainer = self._gateway.registry.trainer
        assert trainer is not None, "a trainer registers before it asks for batches"
        async with self._lock:
            is_new, self._is_new = self._is_new, False
            has_given = not is_new if after is None else after == self._number + 1
            if self._given and has_given:
                await self._acknowledge()
            if not self._given:
                await self._give(self._gateway.queue.take_now(trainer.batch_size))
            return self._number + 1, self._given

    async def _give(self, batch: list[QueuedGroup]) -> None:
        if not batch:
            return
        groups = [queued.seq for queued in batch]
        try:
            await self._gateway.run.append(GIVEN, {"groups": groups}, key=str(self._number + 1))
        except BaseException:  # whatever it was: nobody was given it
            self._gateway.queue.put_back(batch)
            raise
        self._gateway.step += 1
        self._given = batch

    async def _acknowledge(self) -> None:
        groups = [queued.seq for queued in self._given]
        await self._gateway.run.append(BATCH, {"groups": groups}, key=str(self._number + 1))
        # Only now: a batch that is not durable as acknowledged is given again by its number.
        self._number += 1
        done, self._given = self._given, []
        await self._gateway.queue.acknowledge(done)

    async def drop_all(self) -> None:
        """Acknowledge everything that waits, trained or not."""
        async with self._lock:
            if self._given:
                await self._acknowledge()
            while rest := self._gateway.queue.take_rest():
                self._given = rest
                await self._acknowledge()
