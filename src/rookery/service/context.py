"""State that the loops of the service share: records, futures, log, models and metrics."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count

from rookery.service.config import ServiceConfig
from rookery.service.fair_queue import FairSemaphore
from rookery.service.futures import Futures
from rookery.service.state import State, Wal
from rookery.service.work import SAMPLING, Backend, Command, Format, bad

__all__ = ["Metrics", "Pending", "ServiceContext", "Throughput"]


# Speed of work: tokens per second while there is work, over about the last half minute.


MEMORY_S = 30.0
"""Age in seconds at which a measurement counts about a third."""


class Throughput:
    """Tokens per second. Works may run concurrently; time without any work does not count."""

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
        """Measure work of this many tokens inside the block; a failure does not count."""
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


SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


class Metrics:
    """Metrics of one service, in its own registry: a process may run two services."""

    def __init__(self) -> None:
        self._registry, self._tenants = CollectorRegistry(), CollectorRegistry()
        here = self._registry
        labels = ["path", "status"]
        self.requests = Count("rookery_requests", "HTTP requests", labels, registry=here)
        about = "Time to answer HTTP requests"
        self.seconds = Histogram(
            "rookery_request_seconds", about, ["path"], buckets=SECONDS, registry=here
        )
        labels = ["kind", "tenant"]
        self.tokens = Count("rookery_tokens", "Tokens computed", labels, registry=self._tenants)
        about = "Requests in a queue"
        self.waiting = Gauge("rookery_waiting_requests", about, ["queue"], registry=here)
        self.passes = Count("rookery_passes", "Calls of the trainer", ["call"], registry=here)
        about = "Requests in calls of the trainer"
        self.pass_requests = Count("rookery_pass_requests", about, ["call"], registry=here)
        self.snapshots = Count("rookery_snapshots", "Snapshots", registry=here)
        self.models = Gauge("rookery_live_models", "Models in training", registry=here)

    def tokens_by_tenant(self) -> dict[str, dict[str, int]]:
        """Return tokens computed since the start: tenant -> kind -> tokens."""
        tokens: dict[str, dict[str, int]] = {}
        for family in self.tokens.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    by_kind = tokens.setdefault(sample.labels["tenant"], {})
                    by_kind[sample.labels["kind"]] = int(sample.value)
        return tokens

    def text(self, *, has_tenants: bool) -> bytes:
        """Return the page, with or without the numbers that name tenants."""
        page: bytes = generate_latest(self._registry)
        return page + generate_latest(self._tenants) if has_tenants else page


# Accepted works that are not done, counted per tenant, and how often each was started.
#
# If the process dies while a work is computed, the work runs alone next time, and is given up if
# the process dies again. The journal records these `attempts`.


ATTEMPTS, SAMPLE_ATTEMPTS = 2, 3
"""Attempts per work, the last of them alone. Samples are many at a time, and long: they run alone
only after the process died twice with them."""


class Pending:
    """Works by id, in the order of acceptance."""

    def __init__(self) -> None:
        self._works: dict[str, Command] = {}
        self._seqs: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.num_bytes = 0
        """Size of all their bodies."""
        self.attempts: Counter[str] = Counter()
        """Starts without an end, by id, including the running attempt."""

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Command]:
        return iter(list(self._works.values()))

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._works

    def __getitem__(self, work_id: str) -> Command:
        return self._works[work_id]

    def get(self, work_id: str) -> Command | None:
        return self._works.get(work_id)

    def count(self, tenant: str) -> int:
        return self._counts[tenant]

    def num_bytes_of(self, tenant: str) -> int:
        """Return the size of a tenant's bodies."""
        return self._bytes[tenant]

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting works."""
        return len(self._counts)

    def add(self, work: Command) -> None:
        self._works[work.id] = work
        self._counts[work.tenant] += 1
        self._bytes[work.tenant] += len(work.body)
        self.num_bytes += len(work.body)

    def begin(self, work_ids: Iterable[str]) -> None:
        """Count the start of these works."""
        self.attempts.update(work_ids)

    def end(self, work_ids: Iterable[str]) -> None:
        """Undo `begin`: the works ended within this process, in whatever way."""
        for work_id in work_ids:
            self.attempts[work_id] -= 1
            if self.attempts[work_id] <= 0:  # it may be done
                del self.attempts[work_id]

    def is_suspect(self, work: Command) -> bool:
        """True if it must run alone: the process died with it, and perhaps because of it."""
        return self.attempts[work.id] >= _max_attempts(work) - 1

    def is_given_up(self, work: Command) -> bool:
        """True if it must not run again: the process died while it ran alone."""
        return self.attempts[work.id] >= _max_attempts(work)

    def set_durable(self, work_id: str, seq: int) -> None:
        """Record a work's number in the journal, which keeps it while the work is pending."""
        if work_id in self._works:
            self._seqs[work_id] = seq

    def seq(self, work_id: str) -> int | None:
        """Return its number in the journal; None if it is done or not durable."""
        return self._seqs.get(work_id)

    def remove(self, work_id: str) -> bool:
        """Remove a done work; False if it was removed before."""
        work = self._works.pop(work_id, None)
        self._seqs.pop(work_id, None)
        self.attempts.pop(work_id, None)
        if work is None:
            return False
        self._counts[work.tenant] -= 1
        self._bytes[work.tenant] -= len(work.body)
        if not self._counts[work.tenant]:
            del self._counts[work.tenant], self._bytes[work.tenant]
        self.num_bytes -= len(work.body)
        return True


def _max_attempts(work: Command) -> int:
    return SAMPLE_ATTEMPTS if work.kind in SAMPLING else ATTEMPTS


ALL = 1 << 30
"""Width of the turn of a work that runs alone."""


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """Shared state of one service. Only code in the event loop touches it."""

    config: ServiceConfig
    backends: Mapping[str, Backend]
    """Base models, by the names that clients may use."""
    format: Format
    """Format of requests and results."""
    wal: Wal
    metrics: Metrics
    state: State = field(default_factory=State)
    futures: Futures = field(default_factory=Futures)
    pending: Pending = field(default_factory=Pending)
    turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(ALL))
    """Turns for all computation."""

    answers: Counter[str] = field(default_factory=Counter)
    """Bytes of written answers that their client has not read yet, by tenant."""

    def backend(self, base_model: str) -> Backend:
        backend = self.backends.get(base_model)
        if backend is None:
            names = ", ".join(self.backends)
            raise bad(f"This service has no base model {base_model!r:.200}. It has: {names}.")
        return backend

    @asynccontextmanager
    async def computing(self, works: Sequence[Command]) -> AsyncIterator[None]:
        """Wrap all computation of these works. The journal knows of the works before they begin. A
        suspect runs while nothing else does, so that no other work is blamed. No works: a request
        that a restart does not repeat."""
        pending, ids = self.pending, [work.id for work in works]
        width = ALL if any(map(pending.is_suspect, works)) else 1
        async with self.turns.take("", tokens=1, width=width):
            pending.begin(ids)
            try:
                if ids:
                    await self.wal.append({"entry": "began", "ids": ids})
                yield
            except asyncio.CancelledError:  # the service ends in order, or the client gave up
                if ids:
                    self.wal.append({"entry": "ended", "ids": ids})
                raise
            finally:
                pending.end(ids)

    def sentence(self, error: Exception) -> str:
        """Return the text of an error for clients, without the service's folder."""
        folder, text = self.wal.run.path, str(error)
        for path in (folder.resolve(), folder):
            text = text.replace(f"{path}/", "")
        return text
