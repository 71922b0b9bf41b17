"""grpo through a real vLLM server on the CPU: every step is drawn with weights published to it.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_grpo_fleet.py
"""

import os
import runpy
from pathlib import Path

import pytest
import torch

import rookery

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers about half of the tasks, and the tasks."""
    make_addition = runpy.run_path(str(ROOT / "examples" / "addition.py"))["make_addition"]
    folder = tmp_path_factory.mktemp("addition")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the start must be the same everywhere
    make_addition(folder)
    torch.set_num_threads(num_threads)
    return folder


def test_a_policy_learns_on_a_fleet(folder: Path) -> None:
    launch = {
        "model": str(folder / "model"), "python": PYTHON, "replicas": 1, "device": "cpu",
        "dtype": "float32", "max_model_len": 64, "max_loras": 2, "max_cpu_loras": 4,
        "max_lora_rank": 8, "cpu_cache_gib": 1, "enforce_eager": True,
        "env": {"HF_HUB_OFFLINE": "1"},
    }  # fmt: skip
    report = rookery.run_grpo(
        ROOT / "configs" / "grpo_addition.yaml",
        engine={"type": "fleet", "launch": launch},
        tasksets=[
            {"type": "jsonl", "path": str(folder / "tasks.jsonl"), "scorer": {"type": "exact"},
             "sampling": {"max_tokens": 4}, "splits": {"search": 0.6, "select": 0.2, "report": 0.2}}
        ],
        steps=40, save_every=40, seed=0, progress=False,
        runs_dir=folder / "runs", name="fleet",
    ).report  # fmt: skip
    start, end = (checkpoint.mean for checkpoint in report.checkpoints)
    assert start is not None and end is not None and start > 0.4
    assert end - start >= 0.15
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps)
    assert [step.model_step for step in report.steps] == list(range(40))
