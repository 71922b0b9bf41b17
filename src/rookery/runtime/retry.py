"""How something is tried again: twice as long a pause after each failure, up to the longest.

retry = Backoff(first_s=0.1, longest_s=5.0)
answer = await retry.persist(send, on=ConnectionError, limit_s=60)
await asyncio.sleep(retry.pause_s(num_failures))      # for who counts by itself
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import stamina

__all__ = ["Backoff"]

# Else a program without logging prints a bare word at every retry.
logging.getLogger("stamina").addHandler(logging.NullHandler())

Result = TypeVar("Result")
On = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool | float]
"""Errors after which it is tried again; of a function, also how long after."""
_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The first pause, and the longest."""

    first_s: float
    longest_s: float

    def pause_s(self, num_failures: int) -> float:
        """How long to wait after so many failures; none before the first."""
        doublings = min(num_failures - 1, _MOST_DOUBLINGS)
        return min(self.longest_s, self.first_s * 2**doublings) if num_failures > 0 else 0.0

    async def persist(
        self, call: Callable[[], Awaitable[Result]], *, on: On, limit_s: float | None = None
    ) -> Result:
        """Call until it succeeds, for so long; then its last error. Pauses vary by up to 1 s."""
        async for attempt in stamina.retry_context(
            on=on,
            attempts=None,
            timeout=limit_s,
            wait_initial=self.first_s,
            wait_max=self.longest_s,
        ):
            with attempt:
                return await call()
        raise AssertionError("the retry loop ends by returning or raising")
