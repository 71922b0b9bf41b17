"""The order of asks and tells that makes a search independent of the number of workers.

    window = Window(width=16, num_attempts=1000)
    while (step := window.next_step()) is not None:
        match step:
            case Ask(attempt=attempt): start(database.ask(attempt))
            case Tell(attempt=attempt, result=result): tell(database, result)
    # and whenever an attempt ends, failed ones too:
    window.decide(attempt, result)

Attempt k is asked when the attempts up to k - width are told and no later ones: an attempt that
ends early waits here until it is its turn. `width` belongs to the run; it bounds how many attempts
are in flight, and a number of workers never changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Ask", "Tell", "Window"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the database for this attempt now."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Generic[Result]):
    """Tell the database the result of this attempt now."""

    attempt: int
    result: Result


class Window(Generic[Result]):
    """Attempts count from 1. A window that is decided again from the start repeats its steps."""

    def __init__(
        self,
        *,
        width: int,
        num_attempts: int,
        may_begin: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`may_begin` is asked before each attempt; what it says must follow from what was asked
        and told."""
        if width < 1:
            raise ValueError(f"Got width {width}: it is 1 or above; 1 is one attempt at a time.")
        self._width = width
        self._num_attempts = num_attempts
        self._may_begin = may_begin
        self._num_asked = 0
        self._num_told = 0
        self._decided: dict[int, Result] = {}

    @property
    def num_waiting(self) -> int:
        """Attempts that ended and wait for their turn."""
        return len(self._decided)

    def decide(self, attempt: int, result: Result) -> None:
        """Hand in the result of an attempt that was asked; the first one counts."""
        if attempt > self._num_asked:
            raise ValueError(f"Attempt {attempt} is decided before it was asked.")
        if attempt > self._num_told:
            self._decided.setdefault(attempt, result)

    def stop(self) -> None:
        """Ask for no further attempt; those that were asked are told. Idempotent."""
        self._num_attempts = self._num_asked

    def next_step(self) -> Ask | Tell[Result] | None:
        """What to do now; None when an attempt in flight has to end first."""
        is_open = self._num_asked < min(self._num_attempts, self._num_told + self._width)
        if is_open and self._may_begin(self._num_asked + 1):
            self._num_asked += 1
            return Ask(attempt=self._num_asked)
        if self._num_told + 1 in self._decided:
            self._num_told += 1
            return Tell(attempt=self._num_told, result=self._decided.pop(self._num_told))
        return None
