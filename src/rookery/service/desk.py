"""What the loops of the service share: the state, the futures, the write-ahead log, the models."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rookery.service.backend import Backend
from rookery.service.config import ServiceConfig
from rookery.service.futures import Futures
from rookery.service.metrics import Metrics
from rookery.service.pending import Pending
from rookery.service.refusals import bad
from rookery.service.state import State
from rookery.service.wal import Wal

__all__ = ["Desk"]


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

    def backend(self, base_model: str) -> Backend:
        backend = self.backends.get(base_model)
        if backend is None:
            names = ", ".join(self.backends)
            raise bad(f"This service has no base model {base_model!r:.200}. It has: {names}.")
        return backend

    def sentence(self, error: Exception) -> str:
        """What clients are told of an error: nothing of where the service's folder is."""
        folder, text = self.wal.run.path, str(error)
        for path in (folder.resolve(), folder):
            text = text.replace(f"{path}/", "")
        return text
