"""All weights of a tiny model learn two-digit addition, in this process and on vLLM. Minutes.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_grpo_full.py
"""

import os
from pathlib import Path
from statistics import fmean

import pytest
import torch
from addition_training import gaps, select_gain, train_addition
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rookery.runs import Run

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = pytest.mark.timeout(1800)
FULL = {"full": True, "learning_rate": 3e-5}


@pytest.mark.skipif(
    not os.environ.get("ROOKERY_LONG"), reason="takes minutes: set ROOKERY_LONG, or make test-real"
)
def test_all_weights_learn_from_the_reward(addition: Path) -> None:
    """By 0.15 on average over three seeds, on tasks that were not trained on."""
    gains = []
    for seed in (0, 1, 2):
        report = train_addition(addition, f"full-{seed}", seed=seed, share=True, **FULL)
        gains.append(select_gain(report))
        assert max(gaps(report)) < 1e-4
    assert fmean(gains) >= 0.15 and min(gains) >= 0.1, gains


@pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM")
def test_servers_get_all_weights(addition: Path) -> None:
    """A model with a head of its own: vLLM on the CPU keeps the old head of tied ones."""
    model = AutoModelForCausalLM.from_pretrained(addition / "model")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    untied = addition / "untied"
    model.save_pretrained(untied)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (untied / name).write_text((addition / "model" / name).read_text())
    launch = {
        "model": str(untied), "python": PYTHON, "device": "cpu", "replicas": 1, "max_loras": 0,
        "cpu_cache_gib": 1, "enforce_eager": True, "env": {"HF_HUB_OFFLINE": "1"},
    }  # fmt: skip
    report = train_addition(
        addition, "servers", engine={"type": "fleet", "launch": launch}, steps=3, save_every=3,
        groups_per_step=8, **FULL,
    )  # fmt: skip
    assert [row.name for row in report.rows] == ["trained", "base model"]
    assert max(gaps(report)) < 1e-3
    path = addition / "runs" / "servers"
    with Run.view(path) as run:
        assert len({event.payload["model"] for event in run.events("batch")}) == 3
    moved = load_file(path / "checkpoints/step_3/model.safetensors")
    start = load_file(untied / "model.safetensors")
    assert all(not torch.equal(moved[name], start[name]) for name in start)
