"""Trackio: a local database that `trackio show` draws; TRACKIO_SPACE_ID and its other variables
count as always."""

from rookery.runs.metrics import MetricsRow
from rookery.runs.trackers.tracker import PROJECT, TrackedRun

__all__ = ["TrackioTracker"]


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
