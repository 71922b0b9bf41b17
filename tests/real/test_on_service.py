"""Loops against `rookery serve` with SmolLM2 in a process of its own. Two minutes; without
ROOKERY_LONG one of them in seconds."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from marks import long
from service.server_process import ServerProcess

import rookery
from rookery.starters import DEMOS

SPLITS = {"search": 0.3, "select": 0.2, "report": 0.5}
KIND = {"type": "generated", "generator": "mark-kind", "splits": SPLITS}
SCORER = """
def score(task, completion):
    return float(len(completion.text))
"""
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The keys of a config that name the service."""
    server = ServerProcess(tmp_path_factory.mktemp("serve"), {"smollm2": "smollm2"})
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        runner.run(stack.enter_async_context(server.running()))
        try:
            engine = {"type": "service", "url": server.url}
            yield {"engine": engine, "tokenizer": "smollm2"}
        finally:
            runner.run(stack.aclose())


def options(tmp_path: Path) -> dict[str, Any]:
    return {"runs_dir": tmp_path / "runs", "progress": False}


@long
def test_a_search(far: dict[str, Any], tmp_path: Path) -> None:
    config = {
        **far,
        "init": {"type": "file", "path": str(DEMOS / "founders")},
        "tasksets": [KIND],
        "stages": [
            {"type": "ga", "generations": 1, "population": {"size": 2, "children": {"count": 2}}}
        ],
        "finals": {"num_finalists": 2, "num_voters": 1, "random_search": False},
    }
    report = rookery.run_genome(config, **options(tmp_path)).report
    means = {row.name: row.mean or 0.0 for row in report.rows}
    assert report.winner is not None and (report.winner.mean or 0.0) > means["base model"]


@long
def test_labels(far: dict[str, Any], tmp_path: Path) -> None:
    data = {
        "path": str(DEMOS / "reviews.jsonl"),
        "prompt": "Review: {{ review }}\nPositive:",
        "labels": ["True", "False"],
        "group": "pair",
        "limit": 4,
    }
    config = {**far, "data": data, "search": {"iterations": 4, "num_start": 2}, "num_chains": 1}
    labels = rookery.run_icm(config, **options(tmp_path)).path / "labels.jsonl"
    assert {json.loads(row)["label"] for row in labels.read_text().splitlines()} <= {
        "True", "False"
    }  # fmt: skip


def test_answers_are_learned(far: dict[str, Any], tmp_path: Path) -> None:
    adapter = rookery.run_sft(
        "smollm2", "generated:mark-kind", engine=far["engine"], steps=4, batch_size=4, layers=2,
        learning_rate=1e-2, name="taught", **options(tmp_path),
    )  # fmt: skip
    metrics = [
        json.loads(row)["train/loss"]
        for row in (tmp_path / "runs/taught/metrics.jsonl").read_text().splitlines()
    ]
    assert adapter.rank == 8 and metrics[-1] < metrics[0]


@long
def test_a_policy_is_trained(far: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    rows = [json.dumps({"prompt": f"Count to {n}:", "reference": "x"}) for n in range(12)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    scorer = {"type": "python", "function": f"{tmp_path / 'scorer.py'}:score"}
    taskset = {
        "type": "jsonl",
        "path": str(tmp_path / "tasks.jsonl"),
        "scorer": scorer,
        "sampling": {"max_tokens": 8},
    }
    config = {
        **far,
        "tasksets": [taskset],
        "lora": {"rank": 4, "layers": 2},
        "steps": 2,
        "save_every": 2,
        "groups_per_step": 2,
        "group_size": 4,
        "drawing": {"max_tokens": 8},
    }
    outcome = rookery.run_grpo(config, **options(tmp_path))
    assert (outcome.path / "trained/adapter_config.json").is_file()
    gaps = [
        json.loads(row).get("grpo/logprob_gap")
        for row in (outcome.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(gap for gap in gaps if gap is not None) < 1e-3
