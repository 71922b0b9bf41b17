"""The adapters that requests can name: how often each was loaded, and what is in flight on it.

    served = ServedAdapters()
    async with served.changing(ref):         # a load or a retirement, one at a time
        if not served.add_load(ref):         # it is new: the caller checks it, then
            served.add(ref, adapter)
    served.begin([ref])                      # requests are in flight
    unused = served.end([ref])               # the adapters to retire
    is_unused = served.release(ref)          # True: retire it
    async with served.changing(ref):
        if served.remove_unused(ref): ...    # nothing uses it: the caller takes it off the servers

Counts only, no I/O: what is to be done is returned, and `fleet.py` does it.
"""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from rookery.errors import AdapterError, FleetError
from rookery.fleet.adapters.fit import adapts_head
from rookery.fleet.adapters.keyed_locks import KeyedLocks
from rookery.types import Adapter, ModelRef, Weights

__all__ = ["ServedAdapters", "require_adapter"]


@dataclass(slots=True)
class _Served:
    adapter: Adapter
    has_head: bool
    num_loads: int = 1
    num_in_flight: int = 0

    @property
    def is_unused(self) -> bool:
        return self.num_loads <= 0 and self.num_in_flight <= 0


class ServedAdapters:
    """Counts of loads and of requests in flight, by adapter."""

    def __init__(self) -> None:
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

    def has_head(self, ref: ModelRef) -> bool:
        """Whether it is a loaded adapter that adapts the output layer."""
        served = self._served.get(ref)
        return served is not None and served.has_head

    def changing(self, ref: ModelRef) -> AbstractAsyncContextManager[None]:
        """The block of one load or retirement: a load that comes during a retirement waits for its
        end and begins anew."""
        return self._changing.hold(ref)

    def add_load(self, ref: ModelRef) -> bool:
        """Count one more load; False when it is not loaded yet: `add` it."""
        served = self._served.get(ref)
        if served is not None:
            served.num_loads += 1
        return served is not None

    def add(self, ref: ModelRef, adapter: Adapter) -> None:
        """The first load. `adapter` is what servers get."""
        self._served[ref] = _Served(adapter, has_head=adapts_head(adapter))

    def release(self, ref: ModelRef) -> bool:
        """Undo one load; True when nothing uses the adapter any more."""
        served = self._served.get(ref)
        if served is None or served.num_loads <= 0:
            raise FleetError(f"{ref.served_name} is not loaded.")
        served.num_loads -= 1
        if not served.num_loads and self._published.get(ref.name) == ref:
            del self._published[ref.name]
        return served.is_unused

    def publish(self, ref: ModelRef) -> ModelRef | None:
        """`ref`, loaded just now, takes the place of what was published under its name before:
        that is returned, to be released."""
        previous = self._published.get(ref.name)
        self._published[ref.name] = ref
        return previous

    def begin(self, refs: Collection[ModelRef]) -> None:
        """Requests that name them are in flight until `end`: they are not retired meanwhile."""
        for ref in refs:
            self._served[ref].num_in_flight += 1

    def end(self, refs: Collection[ModelRef]) -> list[ModelRef]:
        """Undo one `begin`; those of them that nothing uses any more."""
        for ref in refs:
            self._served[ref].num_in_flight -= 1
        return [ref for ref in refs if self._served[ref].is_unused]

    def remove_unused(self, ref: ModelRef) -> bool:
        """Forget it if nothing uses it; inside `changing`."""
        served = self._served.get(ref)
        if served is None or not served.is_unused:
            return False
        del self._served[ref]
        return True


def require_adapter(weights: Weights) -> Adapter:
    """Servers are given adapters, one beside the other; a whole model is not one."""
    if isinstance(weights, Adapter):
        return weights
    raise AdapterError(
        f"{weights.name} is a whole model; a fleet publishes adapters: train an adapter."
    )
