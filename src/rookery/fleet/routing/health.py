"""Whether a server may be asked: its proof of having the newest weights, and its circuit breaker.

After a loss, the breaker stops sending to a server until a probe succeeds.

closed --a loss--> open --its pause is over--> a probe --it answers--> closed
                     ^------------------------------ it fails: the pause doubles

The first probe follows at once: one failed answer of a healthy server costs one round trip, and a
dying server gets no more calls. If a server answers probes but loses calls, its pauses grow too:
only an answered call resets them.

Callers pass the time in.
"""

from dataclasses import dataclass

from rookery.fleet.http.client import Client, ServerLost
from rookery.fleet.http.probe import ServerMetrics, read_metrics
from rookery.fleet.servers.launch import LocalServer

__all__ = ["Breaker", "Proof", "started"]


FIRST_PAUSE_S = 0.25
"""Pause after the second failure: a restarted server is back within seconds."""
LONGEST_PAUSE_S = 10.0
"""A dead server costs one small request per this many seconds."""


@dataclass(slots=True)
class Breaker:
    """Circuit breaker: closed while the server answers."""

    is_open: bool = False
    pause_s: float = 0.0
    """Pause before the probe that follows the next failure."""
    probe_at_s: float = 0.0
    opened_s: float = 0.0
    """Time of the last opening."""

    def open_for_s(self, *, now_s: float) -> float:
        """Return how long it has been open; 0 while it is closed."""
        return now_s - self.opened_s if self.is_open else 0.0

    def record_success(self) -> None:
        """Close it after an answered probe."""
        self.is_open = False

    def record_answer(self) -> None:
        """Reset the pause after an answered call."""
        self.pause_s = 0.0

    def record_loss(self, *, now_s: float) -> bool:
        """Open it; True if it was closed."""
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


# Which process of a server has shown that it has the right model and the newest weights.
#
# A restarted process has the weights it was started with: of another model, if it was restarted on
# another.


class Proof:
    """The process of one server that proved to have the newest weights, if any had to."""

    def __init__(self, client: Client, local: LocalServer | None) -> None:
        self._client = client
        self._local = local
        self._process: str | None = None
        self._recognised: set[str] = set()

    @property
    def was_given(self) -> bool:
        """True once new weights were published, which every process must prove to have."""
        return self._process is not None

    def recognise(self, process: str) -> None:
        """Record that this process has the model that the fleet was opened on."""
        self._recognised.add(process)

    def is_recognised(self, process: str) -> bool:
        """True if the process has shown its model; several processes may share one address."""
        return bool(process) and (process in self._recognised or self.is_by(process))

    def note(self, process: str) -> None:
        """Record that this process, whose name was read beforehand, has the newest weights."""
        self._process = process

    def withdraw(self) -> None:
        """Forget the proof: there are newer weights."""
        self._process = ""

    async def is_current(self) -> bool:
        """True if the running process has proved to have the newest weights."""
        return self.is_by(await self.running())

    def is_by(self, process: str) -> bool:
        """True if this process gave the proof."""
        return bool(process) and process == self._process

    async def is_of_another(self) -> bool:
        """True if the server reports another process than the one that gave the proof."""
        return await self.running() not in ("", self._process)

    def check(self, metrics: ServerMetrics) -> None:
        """ServerLost if another process than the proved one answers, though no call was lost."""
        running = started(metrics)
        if self._local is None and self._process and running not in ("", self._process):
            raise ServerLost(f"{self._client.url} was started again.", is_broken=False)

    async def running(self) -> str:
        """Return a name that changes with every restart of the server; empty if unknown."""
        if self._local is not None:
            return str(self._local.pid)
        return started(await read_metrics(self._client))


def started(metrics: ServerMetrics | None) -> str:
    """Return the name of the process with these metrics; empty if they do not report its start."""
    return str(metrics.started_s) if metrics and metrics.started_s else ""
