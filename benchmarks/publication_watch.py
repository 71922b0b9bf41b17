"""Measures the parts of a publication of weights."""

import time
from collections.abc import Sequence
from typing import Any

from rookery.fleet import Fleet
from rookery.fleet.bridges.update import Canary, Logprobs

__all__ = ["Watch"]


class Watch:
    """Records start and end of every request to the servers and of the trainer's pass, relative to
    the start of the publication."""

    def __init__(self, fleet: Fleet) -> None:
        self._began = time.perf_counter()
        self._seen: list[tuple[str, float, float]] = []
        for replica in fleet.pool.replicas:
            client = replica.client
            client.post = self._watched(client.post)  # type: ignore[method-assign]
        fleet.load = self._watched(fleet.load, "handing over")  # type: ignore[method-assign]

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._seen = []

    def logprobs(self, work: Logprobs) -> Logprobs:
        async def watched(canary: Canary) -> Sequence[float]:
            began = time.perf_counter()
            found = await work(canary)
            self._seen.append(("the trainer's pass", began, time.perf_counter()))
            return found

        return watched

    def _watched(self, work: Any, name: str = "") -> Any:
        """Wrap a call to record it under `name`, or else under its first argument, a path."""

        async def watched(first: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return await work(first, *args, **options)
            finally:
                self._seen.append((name or first, began, time.perf_counter()))

        return watched

    def show(self) -> None:
        for what, began, ended in sorted(self._seen, key=lambda one: one[1]):
            begin_ms, end_ms = 1e3 * (began - self._began), 1e3 * (ended - self._began)
            print(f"    {what:40}{begin_ms:9.1f} to {end_ms:.1f} ms")
