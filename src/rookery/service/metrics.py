"""Numbers for /metrics, in the format of Prometheus."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = [
    "Metrics",
    "Throughput",
]

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
        self.requests = Counter("rookery_requests", "HTTP requests", labels, registry=here)
        about = "Time to answer HTTP requests"
        self.seconds = Histogram(
            "rookery_request_seconds", about, ["path"], buckets=SECONDS, registry=here
        )
        labels = ["kind", "tenant"]
        self.tokens = Counter("rookery_tokens", "Tokens computed", labels, registry=self._tenants)
        about = "Requests in a queue"
        self.waiting = Gauge("rookery_waiting_requests", about, ["queue"], registry=here)
        self.passes = Counter("rookery_passes", "Calls of the trainer", ["call"], registry=here)
        about = "Requests in calls of the trainer"
        self.pass_requests = Counter("rookery_pass_requests", about, ["call"], registry=here)
        self.snapshots = Counter("rookery_snapshots", "Snapshots", registry=here)
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
