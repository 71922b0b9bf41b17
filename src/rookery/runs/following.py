"""Feeds trackers with the metrics of a run, in a thread of its own.

    with follow_metrics(run, ("tensorboard",)):
        ...                                        # run.log_metrics(3, {"reward/mean": 0.5})

| stage    | consumes                   | produces          | waits for                          |
|----------|----------------------------|-------------------|------------------------------------|
| the run  | metrics                    | metrics.jsonl     | nothing                            |
| a thread | new lines of metrics.jsonl | rows for trackers | the trackers; the next look, 1 s   |

How far the trackers have been fed is kept in `tracked.json`. A resumed run goes on there: lines
that were written and not yet delivered come, and a step that is measured again does not come twice.
A tracker that fails is left out from then on; the metrics are in the run.
"""

import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rookery.errors import RunError, boundary
from rookery.runs.metrics import MetricsRow, read_rows
from rookery.runs.run import Run
from rookery.runs.run_folder import METRICS
from rookery.runs.trackers import TRACKERS, TrackedRun, Tracker, TrackerName

__all__ = ["follow_metrics"]

LOOK_EVERY_S = 1.0
"""Curves are looked at by people."""
CLOSE_S = 60.0
"""How long a tracker may take to end, such as one that uploads."""
TRACKED = "tracked.json"

logger = logging.getLogger(__name__)


@contextmanager
def follow_metrics(run: Run, names: Sequence[TrackerName]) -> Iterator[None]:
    """Everything logged in the block has come to the trackers when it ends."""
    if not names:
        yield
        return
    follower = _Follower(run, names)
    thread = threading.Thread(target=follower.follow, name="rookery-track", daemon=True)
    thread.start()
    try:
        yield
    finally:
        follower.is_over.set()
        thread.join(CLOSE_S)
        if thread.is_alive():
            logger.warning("%s did not end within %g s and may miss the last steps", names, CLOSE_S)


class _Follower:
    """Lives in its thread, but for `is_over`."""

    def __init__(self, run: Run, names: Sequence[TrackerName]) -> None:
        self.is_over = threading.Event()
        self._run = run
        self._names = names
        self._trackers: dict[TrackerName, Tracker] = {}
        known = run.read_json(TRACKED) if (run.path / TRACKED).exists() else {}
        self._read_bytes: int = known.get("read_bytes", 0)
        self._last: dict[str, int] = known.get("last", {})
        """The highest step that was delivered, by the name of the metric."""
        self._first = dict(self._last)
        """The same when the run was opened: what comes again of these steps is left out."""

    def follow(self) -> None:
        tracked = _describe(self._run)
        for name in self._names:
            with self._left_out_if_it_fails(name):
                self._trackers[name] = TRACKERS[name](tracked)
        try:
            while not self.is_over.wait(LOOK_EVERY_S):
                self._deliver()
            self._deliver()
        except RunError as error:
            logger.warning("No more metrics come to %s: %s", ", ".join(self._trackers), error)
        for name, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(name):
                tracker.close()

    def _deliver(self) -> None:
        rows, read_bytes = read_rows(self._run.path / METRICS, after_bytes=self._read_bytes)
        if read_bytes == self._read_bytes:
            return
        fresh = [row for row in map(self._new_part, rows) if row.values]
        for name, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(name):
                for row in fresh:
                    tracker.log(row)
                tracker.flush()
        for row in fresh:
            self._last |= {key: max(row.step, self._last.get(key, 0)) for key in row.values}
        self._read_bytes = read_bytes
        self._run.write_json(TRACKED, {"read_bytes": read_bytes, "last": self._last})

    def _new_part(self, row: MetricsRow) -> MetricsRow:
        values = {k: v for k, v in row.values.items() if row.step > self._first.get(k, -1)}
        return replace(row, values=values)

    @contextmanager
    def _left_out_if_it_fails(self, name: TrackerName) -> Iterator[None]:
        try:
            with boundary(RunError, f"{name} failed and is left out from here on"):
                yield
        except RunError as error:
            self._trackers.pop(name, None)
            logger.warning("%s", error)


def _describe(run: Run) -> TrackedRun:
    """Names are used again after a run was deleted, so its time is part of the id."""
    made = hashlib.blake2b(repr(run.created.time_s).encode(), digest_size=4).hexdigest()
    return TrackedRun(
        id=f"{run.name}-{made}", name=run.name, path=Path(run.path), config=run.config
    )
