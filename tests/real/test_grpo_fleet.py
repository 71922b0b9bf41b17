"""grpo through a real vLLM server on the CPU: every step is drawn with weights published to it.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_grpo_fleet.py
"""

import os
from pathlib import Path

import pytest
from addition_training import gaps, select_gain, train_addition

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(1200),
]


@pytest.mark.parametrize("bridge", ["auto", "merge"])
def test_a_policy_learns_on_a_fleet(addition: Path, bridge: str) -> None:
    launch = {
        "model": str(addition / "model"), "python": PYTHON, "replicas": 1, "device": "cpu",
        "dtype": "float32", "max_model_len": 64, "max_loras": 2, "max_cpu_loras": 4,
        "max_lora_rank": 8, "cpu_cache_gib": 1, "enforce_eager": True,
        "env": {"HF_HUB_OFFLINE": "1"},
    }  # fmt: skip
    engine = {"type": "fleet", "launch": launch}
    report = train_addition(addition, f"fleet-{bridge}", engine=engine, bridge=bridge, seed=0)
    assert select_gain(report) >= 0.15
    assert max(gaps(report)) < 1e-3
    assert [step.model_step for step in report.steps] == list(range(40))
