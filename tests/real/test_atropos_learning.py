"""Addition is learned from an environment behind the gateway: with the embedded engine, and with a
real vLLM server that shares its weights with the trainer.

ROOKERY_LONG=1 ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest \\
  tests/real/test_atropos_learning.py
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from marks import long
from tests.real.peers import needs_vllm, served_on_cpu

import rookery
from rookery.starters.addition import make_addition

ROOT = Path(__file__).parents[2]
PLAYS = Path(__file__).with_name("addition_environment.py")
NOISE = 0.15
"""Between the held-out accuracies of two runs: three standard errors of 200 tasks each."""
pytestmark = [
    long,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that adds half of the time, tasks to play and tasks to measure by."""
    folder = tmp_path_factory.mktemp("addition")
    make_addition(folder)
    lines = (folder / "tasks.jsonl").read_text().splitlines(keepends=True)
    (folder / "played.jsonl").write_text("".join(lines[:600]))
    (folder / "held_out.jsonl").write_text("".join(lines[600:]))
    return folder


def train(folder: Path, name: str, **changes: Any) -> Any:
    command = [sys.executable, str(PLAYS), "{gateway}", "{engine}", str(folder / "played.jsonl")]
    environment = {
        "type": "atropos", "port": 0, "max_token_len": 32, "batch_s": 300,
        "environments": [{"command": command}],
    }  # fmt: skip
    taskset = {
        "type": "jsonl", "path": str(folder / "held_out.jsonl"), "scorer": {"type": "exact"},
        "sampling": {"max_tokens": 4}, "splits": {"search": 0.01, "select": 0.5, "report": 0.49},
    }  # fmt: skip
    return rookery.run_grpo(
        folder / "grpo.yaml",
        tasksets=[taskset], environment=environment, runs_dir=folder / "runs", name=name,
        progress=False, **changes,
    ).report  # fmt: skip


def check(report: Any) -> None:
    start, *_, end = (checkpoint.mean for checkpoint in report.checkpoints)
    assert start is not None and end is not None
    assert end - start >= 0.10
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps)


def test_an_adapter_learns_from_an_environment(folder: Path) -> None:
    engine = {"type": "embedded", "model": str(folder / "model"), "cache_gib": 0.05}
    check(train(folder, "embedded", engine=engine))


@needs_vllm
def test_all_weights_learn_in_the_memory_of_a_server_as_by_copies(folder: Path) -> None:
    launch = served_on_cpu(folder / "model", max_model_len=64)
    changes: dict[str, Any] = {
        "engine": {"type": "fleet", "launch": launch}, "full": True, "learning_rate": 3e-4,
    }  # fmt: skip
    alias = train(folder, "alias", bridge="alias", **changes)
    copy = train(folder, "copy", bridge="copy", **changes)
    check(alias)
    check(copy)
    means = [report.checkpoints[-1].mean for report in (alias, copy)]
    assert abs(means[0] - means[1]) <= NOISE, "answers are drawn anew in each run"
