"""Whether a server may be asked: what its process has shown, and its circuit breaker.

The breaker stops sending to a server after a loss, until a probe succeeds.

closed --a loss--> open --its pause is over--> a probe --it answers--> closed
                     ^------------------------------ it fails: the pause doubles

The first probe follows at once: one failed answer of a healthy server costs it one round trip, and
nothing is sent again to a server that is dying. One that answers probes and loses calls is asked
later and later too: only an answered call takes the pause away.

The clock is handed in, so that tests need none.
"""

from dataclasses import dataclass

from rookery.fleet.http.client import Client, ServerLost
from rookery.fleet.http.probe import ServerMetrics, read_metrics
from rookery.fleet.servers.launch import LocalServer

__all__ = ["Breaker", "Proof", "started"]


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


# Which process of a server has shown that it has the right model, and the newest weights.
#
# A process that was started again has the weights it began with: of another model, if whoever
# started it took another.


class Proof:
    """Of one server; it need not have been asked for one."""

    def __init__(self, client: Client, local: LocalServer | None) -> None:
        self._client = client
        self._local = local
        self._process: str | None = None
        self._recognised: set[str] = set()

    @property
    def was_given(self) -> bool:
        """Whether any process has ever shown it."""
        return self._process is not None

    def recognise(self, process: str) -> None:
        """This process has the model that the fleet was opened on."""
        self._recognised.add(process)

    def is_recognised(self, process: str) -> bool:
        """Whether it has shown that; several may, behind one address."""
        return bool(process) and (process in self._recognised or self.is_by(process))

    def note(self, process: str) -> None:
        """This process has shown it; `running` told its name before it was asked."""
        self._process = process

    def withdraw(self) -> None:
        """There are newer weights, and no process has shown that it has them."""
        self._process = ""

    async def is_current(self) -> bool:
        """Whether the process that runs is the one that has shown it."""
        return self.is_by(await self.running())

    def is_by(self, process: str) -> bool:
        """Whether this process has shown it."""
        return bool(process) and process == self._process

    async def is_of_another(self) -> bool:
        """Whether another process runs than the one that has shown it, as far as it tells."""
        return await self.running() not in ("", self._process)

    def check(self, metrics: ServerMetrics) -> None:
        """ServerLost when another process answers now, though no call was lost in between, and
        does not have the newest weights."""
        running = started(metrics)
        if self._local is None and self._process and running not in ("", self._process):
            raise ServerLost(f"{self._client.url} was started again.", is_broken=False)

    async def running(self) -> str:
        """Tells one process of the server from the next; empty when it cannot be told."""
        if self._local is not None:
            return str(self._local.pid)
        return started(await read_metrics(self._client))


def started(metrics: ServerMetrics | None) -> str:
    """The name of the process whose metrics these are; empty when they do not tell."""
    return str(metrics.started_s) if metrics and metrics.started_s else ""
