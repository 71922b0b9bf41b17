"""Trackers: programs that draw curves, each fed with the metrics of a run by `runs/following.py`.

tensorboard.py    event files in the run's folder
wandb.py          Weights & Biases, offline unless told otherwise
trackio.py        a local database
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from rookery.errors import ConfigError
from rookery.runs.trackers.tensorboard import TensorboardTracker
from rookery.runs.trackers.tracker import TrackedRun, Tracker
from rookery.runs.trackers.trackio import TrackioTracker
from rookery.runs.trackers.wandb import WandbTracker

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "TrackerName", "require_trackers"]

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
