"""Weights & Biases: offline, in the folder `wandb` of the run, unless WANDB_MODE says otherwise.

`wandb sync runs/NAME/wandb/offline-run-*` uploads what is there. WANDB_PROJECT and the other
variables of W&B count as always.
"""

import os

from rookery.runs.metrics import MetricsRow
from rookery.runs.trackers.tracker import PROJECT, TrackedRun

__all__ = ["WandbTracker"]

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
