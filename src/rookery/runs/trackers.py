"""Trackers: programs that draw curves, each fed with the metrics of a run by `follow`.

tensorboard    event files in the run's folder
wandb          Weights & Biases, offline unless told otherwise
trackio        a local database
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rookery.errors import ConfigError
from rookery.runs.metrics import MetricsRow

__all__ = [
    "TRACKERS",
    "TensorboardTracker",
    "TrackedRun",
    "Tracker",
    "TrackerName",
    "TrackioTracker",
    "WandbTracker",
    "require_trackers",
]

PROJECT = "rookery"
"""What the runs are listed under, where a tracker has projects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of the run it shows."""

    id: str
    """The same when the run is resumed, and of no other run: letters, digits, `-`, `_` and `.`."""
    name: str
    path: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Made, called and closed in one thread. May raise anything."""

    def log(self, row: MetricsRow) -> None: ...

    def flush(self) -> None:
        """What was logged survives the end of this process."""
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


# Trackio: a local database that `trackio show` draws; TRACKIO_SPACE_ID and its other variables
# count as always.


class TrackioTracker:
    """A resumed run has the same name there, and so is the same run."""

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
        """Its own thread writes within half a second."""

    def close(self) -> None:
        self._run.finish()


# Weights & Biases: offline, in the folder `wandb` of the run, unless WANDB_MODE says otherwise.
#
# `wandb sync runs/NAME/wandb/offline-run-*` uploads what is there. WANDB_PROJECT and the other
# variables of W&B count as always.


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
        # W&B drops rows whose own step falls, as those of searches side by side do.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, row: MetricsRow) -> None:
        self._run.log({STEP: row.step, **row.values})

    def flush(self) -> None:
        """Another process writes, which outlives this one."""

    def close(self) -> None:
        self._run.finish()


TrackerName = Literal["tensorboard", "trackio", "wandb"]

TRACKERS: Mapping[TrackerName, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""Each is named as its package."""


def require_trackers(names: Iterable[TrackerName]) -> None:
    """Refuse a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"track names {name}, which is not installed: pip install 'rookery[track]', or "
                f"leave {name} out."
            )
