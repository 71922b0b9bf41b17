"""What a tracker is: a program that draws curves, fed with the metrics of one run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rookery.runs.metrics import MetricsRow

__all__ = ["TrackedRun", "Tracker"]

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
