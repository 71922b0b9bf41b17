"""The adapters that requests can name: how often each was loaded, and what is in flight on it.

    served = ServedAdapters(retire=retire)
    await served.load(ref, admit)           # `admit` checks it and returns what is to be sent
    async with served.used([ref]): ...      # requests are in flight
    await served.unload(ref)                # `retire` runs after the last of them

Loads and retirements of one adapter exclude each other: a load that comes during a retirement waits
for its end and begins anew.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rookery.errors import AdapterError, FleetError
from rookery.fleet.adapters.keyed_locks import KeyedLocks
from rookery.types import Adapter, ModelRef, Weights

__all__ = ["ServedAdapters", "require_adapter"]


@dataclass(slots=True)
class _Served:
    adapter: Adapter
    num_loads: int = 1
    num_in_flight: int = 0

    @property
    def is_unused(self) -> bool:
        return self.num_loads <= 0 and self.num_in_flight <= 0


class ServedAdapters:
    """Counts only; `retire` removes an adapter from the servers."""

    def __init__(self, *, retire: Callable[[ModelRef], Awaitable[None]]) -> None:
        self._retire = retire
        self._served: dict[ModelRef, _Served] = {}
        self._published: dict[str, ModelRef] = {}
        self._changing = KeyedLocks[ModelRef]()

    @property
    def refs(self) -> tuple[ModelRef, ...]:
        """Oldest first."""
        return tuple(self._served)

    def find(self, ref: ModelRef) -> Adapter | None:
        served = self._served.get(ref)
        return None if served is None else served.adapter

    async def load(self, ref: ModelRef, admit: Callable[[], Awaitable[Adapter]]) -> None:
        async with self._changing.hold(ref):
            if ref in self._served:
                self._served[ref].num_loads += 1
            else:
                self._served[ref] = _Served(await admit())

    async def unload(self, ref: ModelRef) -> None:
        """Undo one load."""
        served = self._served.get(ref)
        if served is None or served.num_loads <= 0:
            raise FleetError(f"{ref.served_name} is not loaded.")
        served.num_loads -= 1
        if not served.num_loads and self._published.get(ref.name) == ref:
            del self._published[ref.name]
        await self._retire_if_unused(ref)

    async def publish(self, ref: ModelRef) -> None:
        """`ref`, loaded just now, takes the place of what was published under its name before."""
        previous = self._published.get(ref.name)
        self._published[ref.name] = ref
        if previous is not None:
            await self.unload(previous)

    @asynccontextmanager
    async def used(self, refs: Collection[ModelRef]) -> AsyncIterator[None]:
        """They are not retired inside the block."""
        used = [self._served[ref] for ref in refs]
        for served in used:
            served.num_in_flight += 1
        try:
            yield
        finally:
            for served in used:
                served.num_in_flight -= 1
            unused = [ref for ref, served in zip(refs, used, strict=True) if served.is_unused]
            await asyncio.gather(*map(self._retire_if_unused, unused))

    async def _retire_if_unused(self, ref: ModelRef) -> None:
        served = self._served.get(ref)
        if served is None or not served.is_unused:
            return
        async with self._changing.hold(ref):
            served = self._served.get(ref)
            if served is not None and served.is_unused:
                del self._served[ref]
                await self._retire(ref)


def require_adapter(weights: Weights) -> Adapter:
    """Servers are given adapters, one beside the other; a whole model is not one."""
    if isinstance(weights, Adapter):
        return weights
    raise AdapterError(
        f"{weights.name} is a whole model; a fleet publishes adapters: train an adapter."
    )
