"""How long a run still takes, foretold from the work that is left and its pace so far.

    left = TimeLeft()
    left.expect(40, "step")                          # are left, as far as it is known now
    left.expect(640, "answer", worth=1 / 64)         # of a step
    left.did(64, "answer")                           # since the call before
    left.seconds()

Work of one kind goes on at its pace so far, without its beginning: what is known from an
interrupted run takes no time, and the first units take longer than others. A kind that has not
begun takes what its worth takes in the others. A load that comes or goes cannot be foretold.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["PROGRESS", "TimeLeft"]

PROGRESS = "progress.json"
"""The file of a run that tells the page how far it is: done of total, and seconds left."""

FIRST = 0.1
"""The part of the time that does not count, and at least the first unit."""
BURST = 0.25
"""The part of the time after the first unit in which nothing is foretold: units that were computed
side by side come together."""
MOST_MARKS = 512
"""Of a kind; beyond that every second one is forgotten."""


@dataclass(slots=True)
class _Kind:
    left: float = 0.0
    worth: float = 1.0
    marks: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    """Seconds spent on it, and units done by then."""

    @property
    def done(self) -> float:
        return self.marks[-1][1]

    def add(self, units: float, spent_s: float) -> None:
        seconds, done = self.marks[-1]
        if len(self.marks) > MOST_MARKS:
            del self.marks[1:-1:2]
        self.marks.append((seconds + spent_s, done + units))
        self.left = max(0.0, self.left - units)

    @property
    def pace(self) -> float | None:
        """Seconds for a unit, as they were after the beginning; the shorter this is, the more its
        own pace counts. None before the first."""
        seconds, done = self.marks[-1]
        if not done:
            return None
        first = bisect_right(self.marks, (FIRST * seconds, float("inf"))) - 1
        began_s, before = self.marks[max(first, 1)]
        if done == before or not seconds:
            return seconds / done
        share = min(1.0, (1 - began_s / seconds) / (1 - FIRST))
        return share * (seconds - began_s) / (done - before) + (1 - share) * seconds / done


class TimeLeft:
    """Foretells the end of one run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._first: float | None = None
        """When something was done first."""
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()
        """What shows the time left is a thread of its own."""

    def expect(self, units: float, kind: str = "", *, worth: float | None = None) -> None:
        """So many units of this kind are left."""
        with self._lock:
            known = self._kinds.setdefault(kind, _Kind())
            known.left = max(0.0, units)
            if worth is not None:
                known.worth = worth

    def did(self, units: float, kind: str = "") -> None:
        """So many more are done, in the time since the call before."""
        with self._lock:
            now = self._clock()
            self._kinds.setdefault(kind, _Kind()).add(units, now - self._last)
            self._last = now
            if units and self._first is None:
                self._first = now

    def seconds(self) -> float | None:
        """None before anything is done, and when nothing is left."""
        with self._lock:
            now = self._clock()
            if self._first is None or now - self._first < BURST * (now - self._began):
                return None
            left_s = self._left_s()
            # What is overdue says nothing of what comes after it.
            return max(left_s - (now - self._last), left_s / 2) or None

    def _left_s(self) -> float:
        """At the end of the last unit."""
        kinds = self._kinds
        paces = {name: pace for name, kind in kinds.items() if (pace := kind.pace) is not None}
        worth = sum(kinds[name].done * kinds[name].worth for name in paces)
        spent_s = sum(kinds[name].done * pace for name, pace in paces.items())
        mean = spent_s / worth if worth else 0.0
        return sum(kind.left * paces.get(name, kind.worth * mean) for name, kind in kinds.items())
