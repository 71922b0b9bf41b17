"""A tiny model learns two-digit addition from a reward alone. Three minutes on an idle core.

pytest tests/real/test_grpo.py
"""

import runpy
from pathlib import Path

import pytest
import torch

import rookery
from rookery.reports import GrpoReport

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers about half of the tasks, and the tasks."""
    make_addition = runpy.run_path(str(ROOT / "examples" / "addition.py"))["make_addition"]
    folder = tmp_path_factory.mktemp("addition")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the start must be the same everywhere
    make_addition(folder, num_tasks=2000)
    torch.set_num_threads(num_threads)
    return folder


def train(folder: Path, name: str, **values: object) -> GrpoReport:
    return rookery.run_grpo(
        ROOT / "configs" / "grpo_addition.yaml",
        engine={"model": str(folder / "model")},
        tasksets=[
            {"type": "jsonl", "path": str(folder / "tasks.jsonl"), "scorer": {"type": "exact"},
             "sampling": {"max_tokens": 4}, "splits": {"search": 0.5, "select": 0.4, "report": 0.1}}
        ],
        steps=40, save_every=40, progress=False,
        runs_dir=folder / "runs", name=name, **values,
    ).report  # fmt: skip


def gain(report: GrpoReport) -> float:
    """Of the last weights over the start, on tasks that were not trained on."""
    start, end = (checkpoint.mean for checkpoint in report.checkpoints)
    assert start is not None and end is not None and start > 0.4
    return end - start


@pytest.mark.parametrize(("seed", "staleness"), [(0, 0), (1, 0), (2, 0), (0, 1)])
def test_a_policy_learns_from_the_reward(folder: Path, seed: int, staleness: int) -> None:
    report = train(folder, f"rank-8-{seed}-{staleness}", seed=seed, staleness=staleness)
    assert gain(report) >= 0.15
    assert report.trained is not None and report.trained.gain is not None
    assert report.trained.gain.low is not None and report.trained.gain.low > 0
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-4 for gap in gaps)


def test_shuffled_advantages_teach_nothing(folder: Path) -> None:
    assert gain(train(folder, "shuffled", seed=0, advantages="shuffled")) <= 0
