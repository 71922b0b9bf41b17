"""One lock per key, forgotten when nobody holds or awaits it."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["KeyedLocks"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class KeyedLocks(Generic[Key]):
    """`async with locks.hold(ref):` excludes other blocks of the same key, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    @asynccontextmanager
    async def hold(self, key: Key) -> AsyncIterator[None]:
        entry = self._entries.setdefault(key, _Entry())
        entry.num_users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.num_users -= 1
            if not entry.num_users:
                del self._entries[key]
