"""Sampler weights in an engine: loaded when first asked for, the idle ones unloaded, and loaded
again by themselves when they are asked for later.

    async with residency.use(digest) as ref: await engine.sample(...)
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rookery.ports import AdapterFolders
from rookery.types import ModelRef

__all__ = ["Residency"]


@dataclass(slots=True)
class _Resident:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is loaded or unloaded."""
    ref: ModelRef | None = None
    num_users: int = 0


class Residency:
    """Which blobs are loaded, in order of their last use."""

    def __init__(
        self, folders: AdapterFolders, *, folder_of: Callable[[str], Path], limit: int
    ) -> None:
        self._folders = folders
        self._folder_of = folder_of
        self._limit = limit
        self._residents: dict[str, _Resident] = {}
        self.num_loads = 0

    @asynccontextmanager
    async def use(self, blob: str) -> AsyncIterator[ModelRef]:
        """The model of a blob, which stays loaded inside the block."""
        resident = self._residents.pop(blob, None) or _Resident()
        self._residents[blob] = resident  # at the end: used last
        resident.num_users += 1
        try:
            async with resident.lock:
                if resident.ref is None:
                    folder = self._folder_of(blob)
                    resident.ref = await self._folders.load(folder, name=f"sampler-{blob[:16]}")
                    self.num_loads += 1
            await self._unload_idle()
            yield resident.ref
        finally:
            resident.num_users -= 1

    async def _unload_idle(self) -> None:
        """Down to the limit; more than the limit stay while they are all in use. Whoever asks for
        one meanwhile waits for the lock, and loads it again; several calls may unload the same."""
        num_over = len(self._residents) - self._limit
        idle = [(blob, one) for blob, one in self._residents.items() if one.num_users == 0]
        for blob, resident in idle[: max(num_over, 0)]:
            async with resident.lock:
                if resident.num_users == 0 and resident.ref is not None:
                    ref, resident.ref = resident.ref, None
                    await self._folders.unload(ref)
            if resident.num_users == 0 and self._residents.get(blob) is resident:
                del self._residents[blob]
