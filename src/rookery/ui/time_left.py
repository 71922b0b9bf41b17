"""Predicts how long a run still takes, from the remaining work and the pace so far.

    left = TimeLeft()
    left.expect(40, "step")                          # 40 steps remain, as far as is known
    left.expect(640, "answer", worth=1 / 64)         # an answer is worth 1/64 of a step
    left.did(64, "answer")                           # finished since the previous call
    left.limit(0.3)                                  # 30 % of a budget is spent
    left.seconds()

Each kind of work has its own pace, measured after its beginning: results known from an interrupted
run take no time, and the first units are slower than others. A kind that has not begun gets the
pace of the others times its worth. On Linux, paces exclude the time in which other jobs had the
processors, and the time left includes it. Remote servers change speed for all kinds at once: a
speed that has lasted a minute is expected for `AHEAD` minutes, then the mean of a longer window.
Changes of load in the future cannot be predicted.
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
"""Progress file of a run, read by the page: units done, total and seconds left."""

FIRST = 0.1
"""Share of the time that paces ignore. They always ignore the first unit."""
BURST = 0.25
"""Share of the elapsed time that must follow the first unit before anything is predicted: units
computed in parallel arrive together."""
AHEAD = 4.0
"""A speed that has lasted n seconds is expected for AHEAD * n seconds. Lower values notice a change
later, higher ones take noise for a change."""
SHORTEST = 1 / 16
"""Shortest window for measuring a speed, as a share of the time. The window also spans `GAPS` of
its longest waits for a unit: units that arrive together say nothing about speed."""
GAPS = 3
MOST_MARKS = 512
"""Beyond this number, every second mark is dropped."""
LOAD_S = 10.0
"""Shortest window, in seconds, for measuring the load of other jobs."""
LOOK_S = 1.0
"""Seconds between two measurements of that load."""


class Clock:
    """Clock whose call returns (time, time without delays) in seconds.

    A delay is time in which this process and its children waited for processors that other
    programs had. Only Linux reports delays.
    """

    def __init__(self) -> None:
        self._at = self._reported = time.monotonic()
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
            # Threads that wait in parallel count as one delay.
            self._delayed_s += (now - self._at) * waited_s / max(now - self._at, ran_s + waited_s)
            self._at = now
        # A delay is seen late: repeat the last result until the corrected time passes it.
        self._reported = max(self._reported, now - self._delayed_s)
        return now, self._reported


def _threads() -> Iterator[tuple[str, tuple[int, int]]]:
    """Threads of this process and its children, with the nanoseconds that each ran and waited."""
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
            continue  # the process has ended, or the system has no such files


@dataclass(slots=True)
class _Kind:
    left: float = 0.0
    worth: float = 1.0
    spent_s: float = 0.0
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class _Mark:
    spent_s: float
    kinds: dict[str, tuple[float, float]]
    """By kind: seconds spent on it, and its finished units."""


class TimeLeft:
    def __init__(self, clock: Callable[[], tuple[float, float]] | None = None) -> None:
        self._clock = clock or Clock()
        self._readings = [self._clock()]
        """Clock readings in the order of time."""
        self._began = self._last = self._readings[0][1]
        self._first: float | None = None
        """Time of the first finished unit."""
        self._kinds: dict[str, _Kind] = {}
        self._marks = [_Mark(0.0, {})]
        self._budget: list[tuple[float, float]] = []
        """First and newest (time, spent share) of a budget."""
        self._predicted_s: float | None = None
        """Seconds left as of the last unit; None until computed after a change."""
        self._lock = threading.Lock()
        """The display reads the time left from another thread."""

    def expect(self, units: float, kind: str = "", *, worth: float | None = None) -> None:
        """Set the units of a kind that remain."""
        with self._lock:
            work = self._kinds.setdefault(kind, _Kind())
            work.left = max(0.0, units)
            if worth is not None:
                work.worth = worth
            self._predicted_s = None

    def did(self, units: float, kind: str = "") -> None:
        """Count units as finished in the time since the previous call."""
        with self._lock:
            now = self._read_clock()
            spent_s, self._last = now - self._last, now
            if not units:
                return  # the time belongs to no kind
            if self._first is None:
                self._first = now
            work = self._kinds.setdefault(kind, _Kind())
            work.spent_s += spent_s
            work.done += units
            work.left = max(0.0, work.left - units)
            last = self._marks[-1]
            if len(self._marks) > MOST_MARKS:
                del self._marks[1:-1:2]
            kinds = {**last.kinds, kind: (work.spent_s, work.done)}
            self._marks.append(_Mark(last.spent_s + spent_s, kinds))
            self._predicted_s = None

    def limit(self, share: float) -> None:
        """Set the spent share of a budget. The work ends with the budget, even if units remain."""
        with self._lock:
            if share > (self._budget[-1][1] if self._budget else 0.0):
                self._budget = [*self._budget[:1], (self._read_clock(), share)]
                self._predicted_s = None

    def end(self) -> None:
        """Drop all remaining units: some may have been skipped."""
        with self._lock:
            for work in self._kinds.values():
                work.left = 0.0
            self._predicted_s = None

    def seconds(self) -> float | None:
        """Seconds left; None shortly after the start and when nothing is left."""
        with self._lock:
            now = self._read_clock()
            if self._first is None or now - self._first < BURST * (now - self._began):
                return None
            if len(self._budget) == 1:
                return None
            if self._predicted_s is None:
                self._predicted_s = min(self._predict(), self._until_spent())
            # An overdue unit says nothing about the units after it.
            left_s = max(self._predicted_s - (now - self._last), self._predicted_s / 2)
            loads = _Speeds(self._readings)
            return loads.stretch(left_s * loads.mean, shortest_s=LOAD_S) or None

    def _read_clock(self) -> float:
        """Time without delays by other jobs."""
        now = self._clock()
        if len(self._readings) > MOST_MARKS:
            del self._readings[1:-1:2]
        if now[0] > self._readings[-1][0] + LOOK_S:
            self._readings.append(now)
        return now[1]

    def _until_spent(self) -> float:
        """Seconds until the budget is spent at its pace so far."""
        if not self._budget:
            return float("inf")
        (began_s, first), (now_s, share) = self._budget
        return max(0.0, 1 - share) * (now_s - began_s) / (share - first)

    def _predict(self) -> float:
        """Seconds left, counted from the end of the last unit."""
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
        """Seconds per unit after the beginning. The longer the beginning, the more the mean of
        all units counts instead."""
        rows = [mark.kinds[kind] for mark in self._marks if kind in mark.kinds]
        seconds, done = rows[-1]
        first = bisect_right(rows, (FIRST * seconds, float("inf"))) - 1
        began_s, before = rows[max(first, 0)]
        if done == before or not seconds:
            return seconds / done
        share = min(1.0, (1 - began_s / seconds) / (1 - FIRST))
        return share * (seconds - began_s) / (done - before) + (1 - share) * seconds / done


class _Speeds:
    """Speeds of recent windows, compared with the mean."""

    def __init__(self, marks: Sequence[tuple[float, float]]) -> None:
        """Each mark has the seconds spent so far, and the same work in seconds at the mean pace."""
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
        steps.reverse()
        self.spent_s = list(accumulate((took for took, _ in steps), initial=0.0))
        self.usual_s = list(accumulate((usual for _, usual in steps), initial=0.0))
        products = [(took * took, took * usual, usual * usual) for took, usual in steps]
        self.squares = [list(accumulate(one, initial=0.0)) for one in zip(*products, strict=True)]
        self.mean = self.spent_s[-1] / self.usual_s[-1] if self.usual_s[-1] else 1.0
        self.longest_s = list(accumulate((took for took, _ in steps), max, initial=0.0))

    def _longest(self, last_s: float) -> float:
        """Longest wait for a unit that reaches into the last `last_s` seconds."""
        return self.longest_s[min(bisect_left(self.spent_s, last_s), len(self.spent_s) - 1)]

    def factor(self, last_s: float) -> float:
        """Slowdown of the last seconds against the mean pace; nearer 1 if their units differ."""
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
        """Convert seconds at the mean pace to predicted seconds: the next ones at the recent speed,
        later ones at the speed of a longer window."""
        predicted_s, last_s = 0.0, shortest_s
        while (wait_s := GAPS * self._longest(last_s)) > last_s < self.spent_s[-1]:
            last_s = wait_s
        while left_s and last_s < self.spent_s[-1]:
            factor = self.factor(last_s)
            part_s = min(left_s, (AHEAD * last_s - predicted_s) / factor)
            predicted_s += part_s * factor
            left_s -= part_s
            last_s *= 2
        return predicted_s + left_s
