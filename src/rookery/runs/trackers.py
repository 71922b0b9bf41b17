"""Trackers: programs that draw curves, to which a thread sends the metrics of a run.

    with follow_metrics(run, ("tensorboard",)):
        ...                                        # run.log_metrics(3, {"reward/mean": 0.5})

tensorboard    event files in the run's folder
wandb          Weights & Biases, offline by default
trackio        a local database

| stage    | consumes                   | produces          | waits for                          |
|----------|----------------------------|-------------------|------------------------------------|
| the run  | metrics                    | metrics.jsonl     | nothing                            |
| a thread | new lines of metrics.jsonl | rows for trackers | the trackers; the next look, 1 s   |

`tracked.json` stores how far metrics were delivered. A resumed run continues there: undelivered
lines are sent, and a step that is measured again is not sent twice.
"""

import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rookery.errors import ConfigError, RunError, boundary, install_extra
from rookery.runs.metrics import MetricsRow, read_rows
from rookery.runs.run import Run
from rookery.runs.run_folder import METRICS

__all__ = [
    "TRACKERS",
    "TensorboardTracker",
    "TrackedRun",
    "Tracker",
    "TrackerName",
    "TrackioTracker",
    "WandbTracker",
    "follow_metrics",
    "require_trackers",
]


PROJECT = "rookery"
"""Project of the runs, for trackers that have projects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Description of a run for a tracker."""

    id: str
    """Unique to the run, and kept by its resume: letters, digits, `-`, `_` and `.`."""
    name: str
    path: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Made, called and closed in one thread. May raise anything."""

    def log(self, row: MetricsRow) -> None: ...

    def flush(self) -> None:
        """Make logged rows survive the end of this process."""
        ...

    def close(self) -> None: ...


# TensorBoard: event files in the folder `tensorboard` of the run.
#
# `tensorboard --logdir runs` shows all runs.


class TensorboardTracker:
    """A resumed run adds a file to the folder, which TensorBoard shows as one run."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.path / "tensorboard"))

    def log(self, row: MetricsRow) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step, wall_time=row.time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# Trackio: a local database that `trackio show` draws. TRACKIO_SPACE_ID and its other variables have
# their usual effect.


class TrackioTracker:
    """A resumed run keeps its name in Trackio, and so is the same run there."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=run.id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: MetricsRow) -> None:
        self._run.log(dict(row.values), step=row.step)

    def flush(self) -> None:
        """Nothing to do: Trackio's thread writes within half a second."""

    def close(self) -> None:
        self._run.finish()


# Weights & Biases: offline, in the folder `wandb` of the run, unless WANDB_MODE says otherwise.
#
# `wandb sync runs/NAME/wandb/offline-run-*` uploads it. WANDB_PROJECT and the other variables of
# W&B have their usual effect.


STEP = "run/step"
"""The horizontal axis."""


class WandbTracker:
    """A resumed run has the same id: W&B shows its parts as one run."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.id,
            name=run.name,
            resume="allow" if mode == "online" else None,  # offline it only warns
            dir=str(run.path),
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        # W&B drops rows whose own step falls, as with parallel searches.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, row: MetricsRow) -> None:
        self._run.log({STEP: row.step, **row.values})

    def flush(self) -> None:
        """Nothing to do: the writing process outlives this one."""

    def close(self) -> None:
        self._run.finish()


TrackerName = Literal["tensorboard", "trackio", "wandb"]

TRACKERS: Mapping[TrackerName, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""Trackers by the name of their package."""


def require_trackers(names: Iterable[TrackerName]) -> None:
    """Refuse a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"track names {name}, which is not installed: {install_extra('track')}, or leave "
                f"{name} out."
            )


LOOK_EVERY_S = 1.0
"""Seconds between deliveries; only people watch the curves."""
CLOSE_S = 60.0
"""Most seconds that a tracker may take to close, such as to upload."""
TRACKED = "tracked.json"

logger = logging.getLogger(__name__)


@contextmanager
def follow_metrics(run: Run, names: Sequence[TrackerName]) -> Iterator[None]:
    """Deliver everything logged in the block to the trackers before it ends."""
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
    """Used only by its thread, except for `is_over`."""

    def __init__(self, run: Run, names: Sequence[TrackerName]) -> None:
        self.is_over = threading.Event()
        self._run = run
        self._names = names
        self._trackers: dict[TrackerName, Tracker] = {}
        known = run.read_json(TRACKED) if (run.path / TRACKED).exists() else {}
        self._read_bytes: int = known.get("read_bytes", 0)
        self._last: dict[str, int] = known.get("last", {})
        """Metric -> highest delivered step."""
        self._first = dict(self._last)
        """`_last` when the run was opened: values of steps up to it are skipped."""

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
    """Names may be reused after a run was deleted, so the creation time is part of the id."""
    made = hashlib.blake2b(repr(run.created.time_s).encode(), digest_size=4).hexdigest()
    return TrackedRun(
        id=f"{run.name}-{made}", name=run.name, path=Path(run.path), config=run.config
    )
