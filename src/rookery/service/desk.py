"""What the loops of the service share: the state, the futures, the write-ahead log, the models."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rookery.service.backend import Backend
from rookery.service.config import ServiceConfig
from rookery.service.futures import Futures
from rookery.service.metrics import Metrics
from rookery.service.pending import Pending
from rookery.service.refusals import bad
from rookery.service.state import State
from rookery.service.turns import Turns
from rookery.service.wal import Wal
from rookery.service.work import Command

__all__ = ["Desk"]

ALL = 1 << 30
"""So wide is the turn of a work that is computed alone."""


@dataclass(slots=True, kw_only=True)
class Desk:
    """One of these per service. Only code in the event loop touches it."""

    config: ServiceConfig
    backends: Mapping[str, Backend]
    """By the names that clients may use for base models."""
    wal: Wal
    metrics: Metrics
    state: State = field(default_factory=State)
    futures: Futures = field(default_factory=Futures)
    pending: Pending = field(default_factory=Pending)
    turns: Turns = field(default_factory=lambda: Turns(ALL))
    """Whoever computes something."""

    def backend(self, base_model: str) -> Backend:
        backend = self.backends.get(base_model)
        if backend is None:
            names = ", ".join(self.backends)
            raise bad(f"This service has no base model {base_model!r:.200}. It has: {names}.")
        return backend

    @asynccontextmanager
    async def computing(self, works: Sequence[Command]) -> AsyncIterator[None]:
        """Around all computing. The journal knows of the works before they begin, and suspects are
        computed while nothing else is, so that nothing else is blamed. None: a request that is not
        computed again after a restart."""
        pending, ids = self.pending, [work.id for work in works]
        width = ALL if any(map(pending.is_suspect, works)) else 1
        async with self.turns.take("", tokens=1, width=width):
            pending.begin(ids)
            try:
                if ids:
                    await self.wal.append({"entry": "began", "ids": ids})
                yield
            except asyncio.CancelledError:  # the service ends in order, or its client gave it up
                if ids:
                    self.wal.append({"entry": "ended", "ids": ids})
                raise
            finally:
                pending.end(ids)

    def sentence(self, error: Exception) -> str:
        """What clients are told of an error: nothing of where the service's folder is."""
        folder, text = self.wal.run.path, str(error)
        for path in (folder.resolve(), folder):
            text = text.replace(f"{path}/", "")
        return text
