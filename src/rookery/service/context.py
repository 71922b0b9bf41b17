"""What the loops of the service share: state, futures, log, models, and what is counted."""

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


# How fast work is done: tokens per second while there is work, of the last half minute or so.


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


SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


class Metrics:
    """What one service counts; a registry of its own, so that two services in one process do not
    meet."""

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
        """Tenant -> kind -> tokens computed since the start."""
        tokens: dict[str, dict[str, int]] = {}
        for family in self.tokens.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    by_kind = tokens.setdefault(sample.labels["tenant"], {})
                    by_kind[sample.labels["kind"]] = int(sample.value)
        return tokens

    def text(self, *, has_tenants: bool) -> bytes:
        """The page, with what has the names of tenants or without."""
        page: bytes = generate_latest(self._registry)
        return page + generate_latest(self._tenants) if has_tenants else page


# Accepted works that are not done, counted per tenant, and how often each began to be computed.
#
# A work that began in a process that ended before it was done is computed alone the next time, and
# not again when the process ends then too: `attempts` are what the journal has of this.


ATTEMPTS, SAMPLE_ATTEMPTS = 2, 3
"""Of a work, the last of them alone. Samples are many at a time, and long: alone only if the
process ended twice with them."""


class Pending:
    """By id, in order of their acceptance."""

    def __init__(self) -> None:
        self._works: dict[str, Command] = {}
        self._seqs: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.num_bytes = 0
        """Of all their bodies."""
        self.attempts: Counter[str] = Counter()
        """By id: how often they began and did not end, the attempt that is running now too."""

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
        """Of a tenant's bodies."""
        return self._bytes[tenant]

    @property
    def num_tenants(self) -> int:
        """Who wait."""
        return len(self._counts)

    def add(self, work: Command) -> None:
        self._works[work.id] = work
        self._counts[work.tenant] += 1
        self._bytes[work.tenant] += len(work.body)
        self.num_bytes += len(work.body)

    def begin(self, work_ids: Iterable[str]) -> None:
        """They are computed from now on."""
        self.attempts.update(work_ids)

    def end(self, work_ids: Iterable[str]) -> None:
        """They ended in this process, however: that does not count."""
        for work_id in work_ids:
            self.attempts[work_id] -= 1
            if self.attempts[work_id] <= 0:  # it may be done
                del self.attempts[work_id]

    def is_suspect(self, work: Command) -> bool:
        """Whether it is computed alone: the process ended with it, and perhaps because of it."""
        return self.attempts[work.id] >= _most(work) - 1

    def is_given_up(self, work: Command) -> bool:
        """Whether it is not computed again: the process ended with it alone."""
        return self.attempts[work.id] >= _most(work)

    def set_durable(self, work_id: str, seq: int) -> None:
        """Note the journal's number of a work, which stays in the journal while it is pending."""
        if work_id in self._works:
            self._seqs[work_id] = seq

    def seq(self, work_id: str) -> int | None:
        """Its number in the journal; None when it is done, or not durable."""
        return self._seqs.get(work_id)

    def remove(self, work_id: str) -> bool:
        """It is done; False when it was before."""
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


def _most(work: Command) -> int:
    return SAMPLE_ATTEMPTS if work.kind in SAMPLING else ATTEMPTS


ALL = 1 << 30
"""So wide is the turn of a work that is computed alone."""


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """One of these per service. Only code in the event loop touches it."""

    config: ServiceConfig
    backends: Mapping[str, Backend]
    """By the names that clients may use for base models."""
    format: Format
    """What clients write, and read."""
    wal: Wal
    metrics: Metrics
    state: State = field(default_factory=State)
    futures: Futures = field(default_factory=Futures)
    pending: Pending = field(default_factory=Pending)
    turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(ALL))
    """Whoever computes something."""

    answers: Counter[str] = field(default_factory=Counter)
    """By tenant: bytes of answers that were written for one client, and are not read yet."""

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
