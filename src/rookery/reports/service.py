"""The service as it is now: its queues, its tenants and how fast it is."""

from dataclasses import dataclass

__all__ = ["QueueStatus", "ServiceStatus", "TenantStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One of the two queues."""

    name: str
    num_waiting: int
    tokens_waiting: int
    tokens_per_s: float
    """While there is work; 0 before the first."""

    @property
    def wait_s(self) -> float | None:
        """Until the last one is done; None when the speed is not known."""
        return self.tokens_waiting / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """What one tenant has, and what was computed for it since the service started."""

    name: str
    num_pending: int
    """Requests that wait or run."""
    num_models: int
    """In training."""
    num_checkpoints: int
    tokens: dict[str, int]
    """By kind: trained, sampled, prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """All of it."""

    models: tuple[str, ...]
    queues: tuple[QueueStatus, ...]
    tenants: tuple[TenantStatus, ...]
    journal_bytes: int
    """Since the last snapshot."""
