"""The order of asks and tells for throughput: an attempt is told when it ends.

    order = SteadyOrder(num_attempts=1000, has_room=..., may_begin=..., decided=..., planned=[3])

Steps as those of a `Window`, which is the order for results that do not depend on the number of
workers. Attempts that a run decided before are told first, in the order in which it did.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from rookery.loops.evolve.stages import Stages
from rookery.search.programs.window import Ask, Tell

__all__ = ["Order", "SteadyOrder"]


class Order(Protocol):
    """A Window or a SteadyOrder."""

    def decide(self, attempt: int, result: Stages) -> None:
        """Hand in an attempt that ended."""
        ...

    def next_step(self) -> Ask | Tell[Stages] | None:
        """What to do now; None when an attempt in flight has to end first."""
        ...

    def stop(self) -> None:
        """Ask for no further attempt; those in flight are told. Idempotent."""
        ...


class SteadyOrder:
    """Tells at once, asks while there is room."""

    def __init__(
        self,
        *,
        num_attempts: int,
        has_room: Callable[[], bool],
        may_begin: Callable[[int], bool],
        decided: Mapping[int, Stages],
        planned: Iterable[int],
    ) -> None:
        """`decided` in the order of decisions; `planned` began in an earlier session.
        `may_begin` is asked before each attempt."""
        self._num_attempts = num_attempts
        self._has_room = has_room
        self._may_begin = may_begin
        self._told: deque[Tell[Stages]] = deque(
            Tell(attempt=number, result=stages) for number, stages in decided.items()
        )
        self._planned = deque(sorted(planned))
        self._next = 1 + max((*decided, *self._planned), default=0)
        missing = set(range(1, self._next)) - set(decided) - set(self._planned)
        self._planned.extend(sorted(missing))

    def decide(self, attempt: int, result: Stages) -> None:
        self._told.append(Tell(attempt=attempt, result=result))

    def next_step(self) -> Ask | Tell[Stages] | None:
        if self._told:
            return self._told.popleft()
        if not self._has_room():
            return None
        if self._planned:
            may_begin = self._may_begin(self._planned[0])
            return Ask(attempt=self._planned.popleft()) if may_begin else None
        if self._next > self._num_attempts or not self._may_begin(self._next):
            return None
        self._next += 1
        return Ask(attempt=self._next - 1)

    def stop(self) -> None:
        self._num_attempts = min(self._num_attempts, self._next - 1)
