"""The circuit breaker of one server: stops sending to it after a loss, until a probe succeeds.

closed --a loss--> open --its pause is over--> a probe --it answers--> closed
                     ^------------------------------ it fails: the pause doubles

The first probe follows at once: one failed answer of a healthy server costs it one round trip, and
nothing is sent again to a server that is dying.

The clock is handed in, so that tests need none.
"""

from dataclasses import dataclass

__all__ = ["Breaker"]

FIRST_PAUSE_S = 0.25
"""A restarted server is back within seconds: ask soon."""
LONGEST_PAUSE_S = 10.0
"""A dead server costs one small request per this many seconds."""


@dataclass(slots=True)
class Breaker:
    """Closed while the server answers."""

    is_open: bool = False
    pause_s: float = FIRST_PAUSE_S
    probe_at_s: float = 0.0
    opened_s: float = 0.0
    """When it was opened last."""

    def open_for_s(self, *, now_s: float) -> float:
        """How long it has been open; 0 while it is closed."""
        return now_s - self.opened_s if self.is_open else 0.0

    def record_success(self) -> None:
        self.is_open = False
        self.pause_s = FIRST_PAUSE_S

    def record_loss(self, *, now_s: float) -> bool:
        """Open it; True when it was closed."""
        if self.is_open:
            return False
        self.is_open = True
        self.opened_s = self.probe_at_s = now_s
        return True

    def record_failed_probe(self, *, now_s: float) -> None:
        self.record_loss(now_s=now_s)
        self.probe_at_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def should_probe(self, *, now_s: float) -> bool:
        return self.is_open and now_s >= self.probe_at_s
