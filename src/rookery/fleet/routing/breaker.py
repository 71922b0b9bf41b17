"""The circuit breaker of one server: stops sending to it after a loss, until a probe succeeds.

closed --a loss--> open --its pause is over--> a probe --it answers--> closed
                     ^------------------------------ it fails: the pause doubles

The first probe follows at once: one failed answer of a healthy server costs it one round trip, and
nothing is sent again to a server that is dying. One that answers probes and loses calls is asked
later and later too: only an answered call takes the pause away.

The clock is handed in, so that tests need none.
"""

from dataclasses import dataclass

__all__ = ["Breaker"]

FIRST_PAUSE_S = 0.25
"""After the second failure. A restarted server is back within seconds: ask soon."""
LONGEST_PAUSE_S = 10.0
"""A dead server costs one small request per this many seconds."""


@dataclass(slots=True)
class Breaker:
    """Closed while the server answers."""

    is_open: bool = False
    pause_s: float = 0.0
    """Until the probe after the next failure."""
    probe_at_s: float = 0.0
    opened_s: float = 0.0
    """When it was opened last."""

    def open_for_s(self, *, now_s: float) -> float:
        """How long it has been open; 0 while it is closed."""
        return now_s - self.opened_s if self.is_open else 0.0

    def record_success(self) -> None:
        """A probe was answered."""
        self.is_open = False

    def record_answer(self) -> None:
        """A call was answered."""
        self.pause_s = 0.0

    def record_loss(self, *, now_s: float) -> bool:
        """Open it; True when it was closed."""
        if self.is_open:
            return False
        self.is_open = True
        self.opened_s = now_s
        self._pause(now_s)
        return True

    def record_failed_probe(self, *, now_s: float) -> None:
        if not self.record_loss(now_s=now_s):
            self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        self.probe_at_s = now_s + self.pause_s
        self.pause_s = min(max(2 * self.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    def should_probe(self, *, now_s: float) -> bool:
        return self.is_open and now_s >= self.probe_at_s
