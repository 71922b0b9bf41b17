"""A training on a taskset of real verifiers 0.4, which is played in its own interpreter."""

import os
from pathlib import Path

import pytest
from tests.real.peers import toy_training
from tiny import write_tiny_model
from transformers import AutoTokenizer

import rookery

PYTHON = os.environ.get("ROOKERY_VERIFIERS_PYTHON", "")
TASKS = Path(__file__).parents[1] / "unit" / "environments" / "verifiers_tasks"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VERIFIERS_PYTHON has no verifiers"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("taskset", ["even_tokens", "failing_tokens"])
def test_a_policy_is_trained_on_a_taskset_of_verifiers(taskset: str, tmp_path: Path) -> None:
    """Rollouts that fail are drawn again: groups are whole."""
    folder = write_tiny_model(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    environment = {
        "type": "verifiers", "python": PYTHON, "taskset": taskset, "folder": str(TASKS),
        "batch_s": 600,
    }  # fmt: skip
    config = toy_training(folder, environment, drawing={"max_tokens": 8})
    outcome = rookery.run_grpo(config, runs_dir=tmp_path / "runs", name="verifiers", progress=False)
    report = outcome.report
    assert [step.metrics["grpo/num_rollouts"] for step in report.steps] == [8, 8, 8]
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps), "what was drawn is what is trained"
