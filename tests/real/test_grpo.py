"""A tiny model learns two-digit addition from a reward alone: adapters and all weights, in this
process and on vLLM. Three minutes each on an idle core:

    ROOKERY_LONG=1 pytest tests/real/test_grpo.py
"""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from addition_training import gaps, select_gain, train_addition
from marks import long
from safetensors.torch import load_file
from tests.real.peers import needs_vllm, served_on_cpu
from transformers import AutoModelForCausalLM

from rookery.runs import Run

pytestmark = [pytest.mark.timeout(1800), long]
FULL = {"full": True, "learning_rate": 3e-5}


@pytest.mark.parametrize(("seed", "staleness"), [(0, 0), (1, 0), (2, 0), (0, 1)])
def test_a_policy_learns_from_the_reward(addition: Path, seed: int, staleness: int) -> None:
    report = train_addition(addition, f"rank-8-{seed}-{staleness}", seed=seed, staleness=staleness)
    assert select_gain(report) >= 0.15
    assert report.trained is not None and report.trained.gain is not None
    assert report.trained.gain.low is not None and report.trained.gain.low > 0
    assert max(gaps(report)) < 1e-4


def test_shuffled_advantages_teach_nothing(addition: Path) -> None:
    report = train_addition(addition, "shuffled", seed=0, advantages="shuffled")
    assert select_gain(report) <= 0


def test_all_weights_learn_from_the_reward(addition: Path) -> None:
    """By 0.15 on average over three seeds, on tasks that were not trained on."""
    gains = []
    for seed in (0, 1, 2):
        report = train_addition(addition, f"full-{seed}", seed=seed, share=True, **FULL)
        gains.append(select_gain(report))
        assert max(gaps(report)) < 1e-4
    assert fmean(gains) >= 0.15 and min(gains) >= 0.1, gains


@needs_vllm
def test_servers_get_all_weights(addition: Path) -> None:
    """A model with a head of its own: vLLM on the CPU keeps the old head of tied ones."""
    model = AutoModelForCausalLM.from_pretrained(addition / "model")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    untied = addition / "untied"
    model.save_pretrained(untied)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (untied / name).write_text((addition / "model" / name).read_text())
    launch = served_on_cpu(untied, max_loras=0)
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


@needs_vllm
@pytest.mark.parametrize("bridge", ["auto", "merge"])
def test_a_policy_learns_on_a_fleet(addition: Path, bridge: str) -> None:
    sizes = {"max_model_len": 64, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
    launch = served_on_cpu(addition / "model", **sizes)
    engine = {"type": "fleet", "launch": launch}
    report = train_addition(addition, f"fleet-{bridge}", engine=engine, bridge=bridge, seed=0)
    assert select_gain(report) >= 0.15
    assert max(gaps(report)) < 1e-3
    assert [step.model_step for step in report.steps] == list(range(40))
