"""Numbers for /metrics, in the format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


class Metrics:
    """What one service counts; a registry of its own, so that two services in one process do not
    meet."""

    def __init__(self) -> None:
        self._registry, self._tenants = CollectorRegistry(), CollectorRegistry()
        self.requests = Counter(
            "rookery_requests",
            "HTTP requests",
            ["path", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "rookery_request_seconds",
            "Time to answer HTTP requests",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "rookery_tokens", "Tokens computed", ["kind", "tenant"], registry=self._tenants
        )
        self.waiting = Gauge(
            "rookery_waiting_requests", "Requests in a queue", ["queue"], registry=self._registry
        )
        self.passes = Counter(
            "rookery_passes", "Calls of the trainer", ["call"], registry=self._registry
        )
        self.pass_requests = Counter(
            "rookery_pass_requests",
            "Requests in calls of the trainer",
            ["call"],
            registry=self._registry,
        )
        self.snapshots = Counter("rookery_snapshots", "Snapshots", registry=self._registry)
        self.models = Gauge("rookery_live_models", "Models in training", registry=self._registry)

    def tokens_by_tenant(self) -> dict[str, dict[str, int]]:
        """Tenant -> kind -> tokens computed since the start."""
        found: dict[str, dict[str, int]] = {}
        for family in self.tokens.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    own = found.setdefault(sample.labels["tenant"], {})
                    own[sample.labels["kind"]] = int(sample.value)
        return found

    def text(self, *, has_tenants: bool) -> bytes:
        """The page, with what has the names of tenants or without."""
        page: bytes = generate_latest(self._registry)
        return page + generate_latest(self._tenants) if has_tenants else page
