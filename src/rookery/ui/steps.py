"""How far a run of several runs is: the steps that have ended, and the time left.

    steps = Steps({"sft-0": path, "sft-1": path, ...})
    with steps.told(run):                # in its `progress.json`, until the end
        steps.end("sft-0")
        steps.left_s()                   # None where nothing like a step to come was measured

Steps whose names differ in numbers alone are taken to be alike, as the seeds of a league are.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rookery.errors import RookeryError
from rookery.runs import Run
from rookery.ui.display import WRITE_EVERY_S, ProgressFile, every
from rookery.ui.time_left import PROGRESS

__all__ = ["Steps", "steps_left"]


class Steps:
    """The steps of one run, each a run of its own."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places
        self._took: dict[str, float | None] = {}
        """Seconds of those that have ended; None of one that left no run."""
        self._began_s = time.monotonic()
        """The one that is taken now."""

    @contextmanager
    def told(self, run: Run) -> Iterator[None]:
        def look() -> tuple[float, float, float | None]:
            return len(self._took), len(self._places), self.left_s()

        with every(WRITE_EVERY_S, ProgressFile(run, "step", look).write):
            yield

    def end(self, name: str) -> None:
        try:
            with Run.view(self._places[name]) as run:
                self._took[name] = run.worked_s
        except RookeryError:
            self._took[name] = None
        self._began_s = time.monotonic()

    def left_s(self) -> float | None:
        """Without what comes when all steps have ended."""
        coming = [name for name in self._places if name not in self._took]
        if not coming:
            return None
        spent_s = time.monotonic() - self._began_s
        return steps_left(
            self._took, coming, spent_s=spent_s, told_s=_told(self._places[coming[0]])
        )


def steps_left(
    took: Mapping[str, float | None],
    coming: Sequence[str],
    *,
    spent_s: float,
    told_s: float | None,
) -> float | None:
    """The first of those to come has taken `spent_s` and tells `told_s` of itself."""
    alike: dict[str, list[float]] = {}
    for name, seconds in took.items():
        if seconds is not None:
            alike.setdefault(_kind(name), []).append(seconds)
    now, *later = coming
    if told_s is None:
        known = alike.get(_kind(now))
        told_s = None if known is None else max(fmean(known) - spent_s, 0.0)
    elif _kind(now) not in alike:
        alike[_kind(now)] = [spent_s + told_s]
    if told_s is None or any(_kind(name) not in alike for name in later):
        return None
    return told_s + sum(fmean(alike[_kind(name)]) for name in later)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _told(place: Path) -> float | None:
    """The time left that a step tells of itself."""
    try:
        told = json.loads((place / PROGRESS).read_bytes())
        return None if told["left_s"] is None else float(told["left_s"])
    except (OSError, ValueError, TypeError, LookupError):
        return None  # it tells nothing yet
