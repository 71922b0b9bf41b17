"""Keeps two kinds of calls from being in flight on one server at the same time.

    async with exclusion.take("labels"): ...      # waits while "likeliest" calls are in flight

vLLM's older model runner, which is also the one on the CPU, reports log-probabilities of one kind
per step: a request for the likeliest tokens that is computed beside a request for given ones gets
its sampled token and zeros. And on the CPU a request for the base model that is computed beside one
for an adapter gets the adapter of the last slot, when that was ever filled.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["CallExclusion"]


class CallExclusion:
    """Calls of one kind run together; the others wait for all of them. The kind of the call that
    has waited longest is next, with all that wait for it."""

    def __init__(self) -> None:
        self._kind = ""
        self._num = 0
        # Filled by `take`, drained by the last call of a turn; a cancelled waiter leaves it.
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no call is in flight and none waits."""
        return not self._num and not self._waiting

    @asynccontextmanager
    async def take(self, kind: str) -> AsyncIterator[None]:
        """Be one of the calls of this kind for the block. An empty kind goes with any."""
        if not kind:
            yield
            return
        if self._num and (self._kind != kind or self._waiting):
            await self._wait(kind)
        else:
            self._kind, self._num = kind, self._num + 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, kind: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()
            elif (kind, place) in self._waiting:
                self._waiting.remove((kind, place))
            raise

    def _leave(self) -> None:
        self._num -= 1
        if self._num or not self._waiting:
            return
        self._kind = self._waiting[0][0]
        admitted = [place for kind, place in self._waiting if kind == self._kind]
        self._waiting = deque(other for other in self._waiting if other[0] != self._kind)
        for place in admitted:
            if not place.cancelled():
                place.set_result(None)
                self._num += 1
        if not self._num and self._waiting:
            self._num = 1
            self._leave()
