"""How fast work is done: tokens per second while there is work, of the last half minute or so."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Throughput"]

MEMORY_S = 30.0
"""What was measured this long ago counts about a third."""


class Throughput:
    """Works may run side by side; the time when none runs does not count."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._num_running = 0
        self._since = 0.0

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 before the first work is done."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @contextmanager
    def running(self, tokens: int) -> Iterator[None]:
        """A work of so many tokens is done inside the block; one that fails does not count."""
        if not self._num_running:
            self._since = time.monotonic()
        self._num_running += 1
        try:
            yield
            self._add(tokens)
        finally:
            self._num_running -= 1

    def _add(self, tokens: int) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        decay = math.exp(-seconds / MEMORY_S)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds
