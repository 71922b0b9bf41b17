"""Turns at something of limited width, fair between tenants by tokens.

    async with turns.take("ada", tokens=200, width=4, id="req-1"): ...      # four samples at once

A turn wider than all there is is given when nothing else runs.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from rookery.concurrency import run_in_thread
from rookery.service.fair_queue import FairQueue, Place

__all__ = ["Turns"]

Answer = TypeVar("Answer")


class Turns:
    """Who waits is woken in fair order when enough width is free."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._used = 0
        # Filled by `take`, drained when a turn ends or begins; bounded by the limits on requests.
        self._queue: FairQueue[str] = FairQueue()
        self._waiting: dict[str, tuple[asyncio.Future[None], int]] = {}
        self._numbers = itertools.count()
        self._next: str | None = None
        """Taken from the queue, and waiting for enough width."""

    @asynccontextmanager
    async def take(
        self, tenant: str, *, tokens: int, width: int, id: str = ""
    ) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block. `place` finds it by its id."""
        id = id or f"turn-{next(self._numbers)}"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = (turn, width)
        self._queue.put(id, tenant=tenant, tokens=tokens)
        self._wake()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._used -= width
            else:  # cancelled while it waited
                self._waiting.pop(id, None)
                self._queue.remove(id)
                self._next = None if self._next == id else self._next
            self._wake()

    async def in_thread(self, tenant: str, call: Callable[[], Answer], *, tokens: int) -> Answer:
        """Call in a thread, in turn. Who is cancelled waits for its end."""
        async with self.take(tenant, tokens=tokens, width=1):
            return await run_in_thread(call)

    def place(self, id: str) -> Place | None:
        """Where it is in the queue; None when it has its turn."""
        if id == self._next:
            return Place(0, 0)
        place = self._queue.place(id)
        if place is None:
            return None
        return Place(place.ahead + (self._next is not None), place.tokens_ahead)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_waiting_of(self, tenant: str) -> int:
        return self._queue.num_items(tenant)

    @property
    def tokens_waiting(self) -> int:
        return self._queue.tokens

    def _wake(self) -> None:
        while True:
            self._next = self._next or self._queue.take()
            if self._next is None:
                return
            turn, width = self._waiting[self._next]
            if turn.cancelled():  # who waited has not run since, and cleans up when it does
                self._next = None
                continue
            if self._used and self._used + width > self._width:
                return
            del self._waiting[self._next]
            self._next = None
            self._used += width
            turn.set_result(None)
