"""A pause of all calls: nothing is in flight, and what comes waits for the end.

async with pause.calls():      # who changes what answers are computed with
await pause.over()             # every call, before it begins
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rookery.embedded.calls import Calls

__all__ = ["Pause"]


class Pause:
    """Belongs to one event loop. Pauses follow one another."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._turn = asyncio.Lock()
        # Cleared by `calls`, which sets it again whatever happens; `over` waits for it.
        self._is_over = asyncio.Event()
        self._is_over.set()

    async def over(self) -> None:
        """Return when calls may begin."""
        while not self._is_over.is_set():  # the next pause may begin before a waiter runs
            await self._is_over.wait()

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """Wait for the end of what is in flight; nothing begins inside the block."""
        async with self._turn:
            self._is_over.clear()
            try:
                await self._calls.idle.wait()
                yield
            finally:
                self._is_over.set()
