"""Retries with exponential pauses.

retry = Backoff(first_s=0.1, longest_s=5.0)
answer = await retry.persist(send, on=ConnectionError, limit_s=60)
await asyncio.sleep(retry.pause_s(num_failures))      # with a count of your own
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import stamina

__all__ = ["Backoff"]

# Without a handler, stamina prints a bare word at every retry.
logging.getLogger("stamina").addHandler(logging.NullHandler())

Result = TypeVar("Result")
On = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool | float]
"""Errors to retry after; a function may also return the pause in seconds."""
_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that double from `first_s` up to `longest_s`."""

    first_s: float
    longest_s: float

    def pause_s(self, num_failures: int) -> float:
        """Pause after this many failures; 0 before the first."""
        doublings = min(num_failures - 1, _MOST_DOUBLINGS)
        return min(self.longest_s, self.first_s * 2**doublings) if num_failures > 0 else 0.0

    async def persist(
        self, call: Callable[[], Awaitable[Result]], *, on: On, limit_s: float | None = None
    ) -> Result:
        """Call until it succeeds; after `limit_s`, raise its last error. Jitter adds up to 1 s."""
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
