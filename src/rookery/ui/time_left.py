"""How long a run still takes, foretold from the work that is left and its pace so far.

    left = TimeLeft()
    left.expect(40, "step")                          # are left, as far as it is known now
    left.expect(640, "answer", worth=1 / 64)         # of a step
    left.did(64, "answer")                           # since the call before
    left.limit(0.3)                                  # of a budget is spent
    left.seconds()

Each kind of work has its pace, without its beginning: what is known from an interrupted run takes
no time, and the first units take longer than others. A kind that has not begun takes what its worth
takes in the others. Where Linux tells for how long other jobs had the processors, paces are without
these times, and the time left is with them. Servers elsewhere get slower and faster for all kinds
at once: a speed that has lasted a minute is expected for `AHEAD` minutes, and for what comes after
that the mean of a longer time. Nobody can foretell a load that has not come yet, or when one goes.
"""

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = ["PROGRESS", "TimeLeft"]

PROGRESS = "progress.json"
"""The file of a run that tells the page how far it is: done of total, and seconds left."""

FIRST = 0.1
"""The part of the time that does not count, and at least the first unit."""
BURST = 0.25
"""The part of the time after the first unit in which nothing is foretold: units that were computed
side by side come together."""
AHEAD = 4.0
"""So many times as long as a speed has lasted it is expected to last: lower values notice a change
later, higher ones take noise for a change."""
SHORTEST = 1 / 16
"""The part of the time that a speed is measured over at least, and `GAPS` of the longest waits for
a unit in it: units that come together say nothing of speed."""
GAPS = 3
MOST_MARKS = 512
"""Beyond that every second one is forgotten."""
LOAD_S = 10.0
"""What other jobs take is measured over so long at least."""
LOOK_S = 1.0
"""Between two looks at it."""


class Clock:
    """Seconds that pass, and of these the ones in which no other program had the processors that
    this one and those that it started waited for. Other systems than Linux do not tell it."""

    def __init__(self) -> None:
        self._at = self._told = time.monotonic()
        self._delayed_s = 0.0
        self._seen = dict(_threads())

    def __call__(self) -> tuple[float, float]:
        now = time.monotonic()
        if now > self._at + LOOK_S:
            before, self._seen = self._seen, dict(_threads())
            ran_s, waited_s = (
                sum(
                    max(0, times[k] - before.get(id, (0, 0))[k]) for id, times in self._seen.items()
                )
                / 1e9
                for k in range(2)
            )
            # Threads that wait side by side are delayed once.
            self._delayed_s += (now - self._at) * waited_s / max(now - self._at, ran_s + waited_s)
            self._at = now
        # A delay is seen after it was: what was told meanwhile stands until time is beyond it.
        self._told = max(self._told, now - self._delayed_s)
        return now, self._told


def _threads() -> Iterator[tuple[str, tuple[int, int]]]:
    """The threads of this program and of those that it started: nanoseconds in which each ran, and
    waited to."""
    open_ids = [str(os.getpid())]
    while open_ids:
        tasks = f"/proc/{open_ids.pop()}/task"
        try:
            for id in os.listdir(tasks):
                with open(f"{tasks}/{id}/schedstat") as file:
                    ran, waited, _ = file.read().split()
                yield id, (int(ran), int(waited))
                with open(f"{tasks}/{id}/children") as file:
                    open_ids += file.read().split()
        except OSError:
            continue  # it has ended, or there are no such files


@dataclass(slots=True)
class _Kind:
    left: float = 0.0
    worth: float = 1.0
    spent_s: float = 0.0
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """What was done when a unit was."""

    spent_s: float
    kinds: dict[str, tuple[float, float]]
    """Seconds spent on each kind, and its units."""


class TimeLeft:
    """Foretells the end of one run."""

    def __init__(self, clock: Callable[[], tuple[float, float]] | None = None) -> None:
        self._clock = clock or Clock()
        self._looks = [self._clock()]
        """At the clock, in the order of time."""
        self._began = self._last = self._looks[0][1]
        self._first: float | None = None
        """When something was done first."""
        self._kinds: dict[str, _Kind] = {}
        self._marks = [_Mark(0.0, {})]
        self._budget: list[tuple[float, float]] = []
        """When something of a budget was spent first and last, and the part by then."""
        self._known: float | None = None
        """What was foretold since the last change."""
        self._lock = threading.Lock()
        """What shows the time left is a thread of its own."""

    def expect(self, units: float, kind: str = "", *, worth: float | None = None) -> None:
        """So many units of this kind are left."""
        with self._lock:
            known = self._kinds.setdefault(kind, _Kind())
            known.left = max(0.0, units)
            if worth is not None:
                known.worth = worth
            self._known = None

    def did(self, units: float, kind: str = "") -> None:
        """So many more are done, in the time since the call before."""
        with self._lock:
            now = self._look()
            spent_s, self._last = now - self._last, now
            if not units:
                return  # nobody's time
            if self._first is None:
                self._first = now
            known = self._kinds.setdefault(kind, _Kind())
            known.spent_s += spent_s
            known.done += units
            known.left = max(0.0, known.left - units)
            last = self._marks[-1]
            if len(self._marks) > MOST_MARKS:
                del self._marks[1:-1:2]
            kinds = {**last.kinds, kind: (known.spent_s, known.done)}
            self._marks.append(_Mark(last.spent_s + spent_s, kinds))
            self._known = None

    def limit(self, share: float) -> None:
        """This part of a budget is spent: the work ends with the budget, whatever is expected."""
        with self._lock:
            if share > (self._budget[-1][1] if self._budget else 0.0):
                self._budget = [*self._budget[:1], (self._look(), share)]
                self._known = None

    def end(self) -> None:
        """Nothing is left, whatever was expected: some of it may have been skipped."""
        with self._lock:
            for known in self._kinds.values():
                known.left = 0.0
            self._known = None

    def seconds(self) -> float | None:
        """None before anything is done, and when nothing is left."""
        with self._lock:
            now = self._look()
            if self._first is None or now - self._first < BURST * (now - self._began):
                return None
            if len(self._budget) == 1:
                return None
            if self._known is None:
                self._known = min(self._foretell(), self._until_spent())
            # What is overdue says nothing of what comes after it.
            left_s = max(self._known - (now - self._last), self._known / 2)
            loads = _Speeds(self._looks)
            return loads.stretch(left_s * loads.mean, shortest_s=LOAD_S) or None

    def _look(self) -> float:
        """The time without that of other jobs."""
        now = self._clock()
        if len(self._looks) > MOST_MARKS:
            del self._looks[1:-1:2]
        if now[0] > self._looks[-1][0] + LOOK_S:
            self._looks.append(now)
        return now[1]

    def _until_spent(self) -> float:
        """Seconds until the budget is spent, if it goes on as it did."""
        if not self._budget:
            return float("inf")
        (began_s, first), (now_s, share) = self._budget
        return max(0.0, 1 - share) * (now_s - began_s) / (share - first)

    def _foretell(self) -> float:
        """Seconds left at the end of the last unit."""
        kinds = {name: kind for name, kind in self._kinds.items() if kind.done}
        paces = {name: self._pace(name) for name in kinds}
        worth = sum(kind.done * kind.worth for kind in kinds.values())
        spent_s = sum(kind.done * paces[name] for name, kind in kinds.items())
        mean = spent_s / worth if worth else 0.0
        left_s = sum(
            kind.left * paces.get(name, kind.worth * mean) for name, kind in self._kinds.items()
        )
        all_s = self._marks[-1].spent_s
        began = bisect_right(self._marks, FIRST * all_s, key=lambda mark: mark.spent_s) - 1
        marks = [
            (mark.spent_s, sum(paces[name] * done for name, (_, done) in mark.kinds.items()))
            for mark in self._marks[max(began, 1) :]
        ]
        return _Speeds(marks).stretch(left_s, shortest_s=SHORTEST * all_s)

    def _pace(self, kind: str) -> float:
        """Seconds for a unit, as they were after the beginning; the shorter this is, the more its
        own pace counts."""
        rows = [mark.kinds[kind] for mark in self._marks if kind in mark.kinds]
        seconds, done = rows[-1]
        first = bisect_right(rows, (FIRST * seconds, float("inf"))) - 1
        began_s, before = rows[max(first, 0)]
        if done == before or not seconds:
            return seconds / done
        share = min(1.0, (1 - began_s / seconds) / (1 - FIRST))
        return share * (seconds - began_s) / (done - before) + (1 - share) * seconds / done


class _Speeds:
    """How fast the last seconds went, against all of them."""

    def __init__(self, marks: Sequence[tuple[float, float]]) -> None:
        """Seconds spent by then, and seconds that it takes at the mean pace."""
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
        steps.reverse()
        self.spent_s = list(accumulate((took for took, _ in steps), initial=0.0))
        self.usual_s = list(accumulate((usual for _, usual in steps), initial=0.0))
        products = [(took * took, took * usual, usual * usual) for took, usual in steps]
        self.squares = [list(accumulate(one, initial=0.0)) for one in zip(*products, strict=True)]
        self.mean = self.spent_s[-1] / self.usual_s[-1] if self.usual_s[-1] else 1.0
        self.longest_s = list(accumulate((took for took, _ in steps), max, initial=0.0))

    def _longest(self, last_s: float) -> float:
        """The longest wait for a unit that reaches into the last seconds."""
        return self.longest_s[min(bisect_left(self.spent_s, last_s), len(self.spent_s) - 1)]

    def factor(self, last_s: float) -> float:
        """Of the mean pace in the last seconds: nearer to 1 the more the units of these differ."""
        num = min(bisect_left(self.spent_s, last_s), len(self.spent_s) - 1)
        took, usual = self.spent_s[num], self.usual_s[num]
        if usual <= 0 or took <= 0:
            return 1.0
        ratio, mean = took / usual, self.mean
        both, cross, one = (sums[num] for sums in self.squares)
        noise = max(0.0, both - 2 * ratio * cross + ratio**2 * one) / (usual * mean) ** 2
        change = ratio / mean - 1
        return 1 + change**3 / (change**2 + noise) if change else 1.0

    def stretch(self, left_s: float, *, shortest_s: float) -> float:
        """Seconds at the mean pace as they will be: the next at the speed of the last, what is
        farther away at that of a longer time."""
        foretold_s, last_s = 0.0, shortest_s
        while (wait_s := GAPS * self._longest(last_s)) > last_s < self.spent_s[-1]:
            last_s = wait_s
        while left_s and last_s < self.spent_s[-1]:
            factor = self.factor(last_s)
            part_s = min(left_s, (AHEAD * last_s - foretold_s) / factor)
            foretold_s += part_s * factor
            left_s -= part_s
            last_s *= 2
        return foretold_s + left_s
