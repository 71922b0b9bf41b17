"""TensorBoard: event files in the folder `tensorboard` of the run.

`tensorboard --logdir runs` shows all runs.
"""

from rookery.runs.metrics import MetricsRow
from rookery.runs.trackers.tracker import TrackedRun

__all__ = ["TensorboardTracker"]


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
