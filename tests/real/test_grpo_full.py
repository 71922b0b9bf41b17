"""All weights of a tiny model learn two-digit addition, in this process and on vLLM. Minutes.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_grpo_full.py
"""

import json
import os
import runpy
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rookery
from rookery.reports import GrpoReport

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
SPLITS = {"search": 0.5, "select": 0.4, "report": 0.1}
pytestmark = pytest.mark.timeout(1800)


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
    taskset = {
        "type": "jsonl", "path": str(folder / "tasks.jsonl"), "scorer": {"type": "exact"},
        "sampling": {"max_tokens": 4}, "splits": SPLITS,
    }  # fmt: skip
    settings = {"engine": {"model": str(folder / "model")}, "steps": 40, "save_every": 40} | values
    return rookery.run_grpo(
        ROOT / "configs" / "grpo_addition.yaml",
        tasksets=[taskset], full=True, learning_rate=3e-5, progress=False,
        runs_dir=folder / "runs", name=name, **settings,
    ).report  # fmt: skip


@pytest.mark.skipif(
    not os.environ.get("ROOKERY_LONG"), reason="takes minutes: set ROOKERY_LONG, or make test-real"
)
def test_all_weights_learn_from_the_reward(folder: Path) -> None:
    """By 0.15 on average over three seeds, on tasks that were not trained on."""
    gains = []
    for seed in (0, 1, 2):
        report = train(folder, f"full-{seed}", seed=seed, share=True)
        start, end = (checkpoint.mean for checkpoint in report.checkpoints)
        assert start is not None and end is not None
        gains.append(end - start)
        gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
        assert all(gap is not None and gap < 1e-4 for gap in gaps)
    assert fmean(gains) >= 0.15 and min(gains) >= 0.1, gains


@pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM")
def test_servers_get_all_weights(folder: Path) -> None:
    """A model with a head of its own: vLLM on the CPU keeps the old head of tied ones."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    untied = folder / "untied"
    model.save_pretrained(untied)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (untied / name).write_text((folder / "model" / name).read_text())
    launch = {
        "model": str(untied), "python": PYTHON, "device": "cpu", "replicas": 1, "max_loras": 0,
        "cpu_cache_gib": 1, "enforce_eager": True, "env": {"HF_HUB_OFFLINE": "1"},
    }  # fmt: skip
    report = train(
        folder, "servers", engine={"type": "fleet", "launch": launch}, steps=3, save_every=3,
        groups_per_step=8,
    )  # fmt: skip
    assert [row.name for row in report.rows] == ["trained", "base model"]
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps)
    run = folder / "runs" / "servers"
    versions = {
        json.loads(line)["payload"]["model"]
        for path in run.glob("events*")
        for line in path.read_text().splitlines()
        if json.loads(line)["kind"] == "batch"
    }
    assert len(versions) == 3
    moved = load_file(run / "checkpoints/step_3/model.safetensors")
    start = load_file(untied / "model.safetensors")
    assert all(not torch.equal(moved[name], start[name]) for name in start)
