"""What the operator sees of a running service."""

from collections import Counter

from rookery.reports import QueueStatus, ServiceStatus, TenantStatus
from rookery.service.service import Service

__all__ = ["read_status"]


def read_status(service: Service) -> ServiceStatus:
    """As it is now. Costs grow with what tenants have."""
    desk, training, drawing = service.desk, service.training, service.drawing
    live = Counter(model.tenant for model in desk.state.models.values() if model.is_live)
    saved = Counter(checkpoint.tenant for checkpoint in desk.state.checkpoints.values())
    tokens = desk.metrics.tokens_by_tenant()
    names = sorted({*live, *saved, *tokens, *(s.tenant for s in desk.state.sessions.values())})
    return ServiceStatus(
        models=tuple(desk.backends),
        queues=(
            QueueStatus(
                name="training",
                num_waiting=training.num_waiting,
                tokens_waiting=training.tokens_waiting,
                tokens_per_s=training.throughput.per_s,
            ),
            QueueStatus(
                name="sampling",
                num_waiting=drawing.turns.num_waiting,
                tokens_waiting=drawing.turns.tokens_waiting,
                tokens_per_s=drawing.throughput.per_s,
            ),
        ),
        tenants=tuple(
            TenantStatus(
                name=name,
                num_pending=desk.pending.count(name),
                num_models=live[name],
                num_checkpoints=saved[name],
                tokens=tokens.get(name, {}),
            )
            for name in names
        ),
        journal_bytes=desk.wal.num_bytes,
    )
