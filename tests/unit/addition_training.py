"""grpo on two-digit addition with the model of rookery.starters.addition, for tests that take long.

report = train_addition(folder, "rank-8", seed=1)      # `folder` is the fixture `addition`
"""

from pathlib import Path

import pytest

import rookery
from rookery.reports import GrpoReport
from rookery.starters.addition import make_addition

__all__ = ["addition", "gaps", "select_gain", "train_addition"]

ROOT = Path(__file__).parents[2]
SPLITS = {"search": 0.5, "select": 0.4, "report": 0.1}


@pytest.fixture(scope="session")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers a third to half of the tasks, by the kind of CPU, and the tasks."""
    folder = tmp_path_factory.mktemp("addition")
    make_addition(folder, num_tasks=2000)
    return folder


def train_addition(folder: Path, name: str, **values: object) -> GrpoReport:
    """40 steps, unless told; measured before and after them."""
    taskset = {
        "type": "jsonl", "path": str(folder / "tasks.jsonl"), "scorer": {"type": "exact"},
        "sampling": {"max_tokens": 4}, "splits": SPLITS,
    }  # fmt: skip
    settings = {"engine": {"model": str(folder / "model")}, "steps": 40, "save_every": 40} | values
    return rookery.run_grpo(
        folder / "grpo.yaml",
        name=name,
        runs_dir=folder / "runs",
        progress=False,
        tasksets=[taskset],
        **settings,
    ).report


def select_gain(report: GrpoReport) -> float:
    """Of the last weights over the start, on tasks that were not trained on."""
    start, end = (checkpoint.mean for checkpoint in report.checkpoints)
    assert start is not None and end is not None and start > 0.3
    return end - start


def gaps(report: GrpoReport) -> list[float]:
    """Between engine and trainer; every step must have one."""
    found = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    measured = [gap for gap in found if gap is not None]
    assert len(measured) == len(found)
    return measured
