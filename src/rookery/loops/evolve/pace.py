"""How many children may wait for an evaluation before no further model call is begun.

    pace = Pace(num_workers=8)
    pace.model.add(5.0)
    pace.evaluation.add(0.1)
    pace.backlog == 400

A call that begins now is answered after the time of a call. Children that are evaluated by then do
not delay its own, so as many may wait: answers that come all at once then do not stop the model.
Where evaluations take long few may wait, as parents would be chosen long before their children
count.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Pace"]

PER_WORKER = 2
"""Children that may always wait: no worker waits for the model."""
MEMORY = 0.9
"""How much of a mean is left after a new time."""


@dataclass(slots=True)
class MeanSeconds:
    """A mean in which old times fade; None before the first."""

    value: float | None = None

    def add(self, seconds: float) -> None:
        known = seconds if self.value is None else self.value
        self.value = MEMORY * known + (1 - MEMORY) * seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what the block takes, if it ends well."""
        start = time.monotonic()
        yield
        self.add(time.monotonic() - start)


@dataclass(slots=True, kw_only=True)
class Pace:
    """What model calls and evaluations have taken lately."""

    num_workers: int
    model: MeanSeconds = field(default_factory=MeanSeconds)
    evaluation: MeanSeconds = field(default_factory=MeanSeconds)

    @property
    def backlog(self) -> int:
        """Children that may wait."""
        each = PER_WORKER
        if self.model.value is not None and self.evaluation.value:
            each = max(each, int(self.model.value / self.evaluation.value))
        return each * self.num_workers
