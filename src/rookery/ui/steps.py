"""Progress of a run made of several runs: finished steps and the time left.

    steps = Steps({"sft-0": path, "sft-1": path, ...})
    with steps.told(run):                # keeps the run's `progress.json` current
        steps.end("sft-0")
        steps.left_s()                   # None while a coming kind of step is unmeasured

Steps whose names differ only in numbers count as one kind, as the seeds of a league do.
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
    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places
        self._took: dict[str, float | None] = {}
        """Working seconds of each finished step; None if it left no readable run."""
        self._began_s = time.monotonic()
        """Monotonic time at which the current step began."""

    @contextmanager
    def told(self, run: Run) -> Iterator[None]:
        def measure() -> tuple[float, float, float | None]:
            return len(self._took), len(self._places), self.left_s()

        with every(WRITE_EVERY_S, ProgressFile(run, "step", measure).write):
            yield

    def end(self, name: str) -> None:
        try:
            with Run.view(self._places[name]) as run:
                self._took[name] = run.worked_s
        except RookeryError:
            self._took[name] = None
        self._began_s = time.monotonic()

    def left_s(self) -> float | None:
        """Seconds until the last step ends, without the work after it; None if unknown."""
        coming = [name for name in self._places if name not in self._took]
        if not coming:
            return None
        spent_s = time.monotonic() - self._began_s
        return steps_left(
            self._took, coming, spent_s=spent_s, told_s=_reported_left_s(self._places[coming[0]])
        )


def steps_left(
    took: Mapping[str, float | None],
    coming: Sequence[str],
    *,
    spent_s: float,
    told_s: float | None,
) -> float | None:
    """Seconds until all `coming` steps have ended; None if a kind of step is unmeasured.

    `coming[0]` is the current step: it has taken `spent_s` and itself reports `told_s` left.
    """
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


def _reported_left_s(place: Path) -> float | None:
    """Seconds left that a step reports in its progress file."""
    try:
        progress = json.loads((place / PROGRESS).read_bytes())
        return None if progress["left_s"] is None else float(progress["left_s"])
    except (OSError, ValueError, TypeError, LookupError):
        return None  # the step has reported nothing yet
