"""What a loop leaves is what another takes: every pair, on the tiny model."""

import ctypes
import json
import math
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import pytest
from driving import write_rows
from tiny import tiny_adapter

import rookery
from rookery.compose.serve import ServeConfig, serving
from rookery.compose.steps import give_back_memory
from rookery.embedded import EngineConfig
from rookery.engines import open_engine
from rookery.errors import ConfigError
from rookery.reports import parse_genome_report
from rookery.runs import Run
from rookery.tasks.taskset import load_taskset_file
from rookery.tasks.template import load_template
from rookery.types import SampleRequest, SamplingParams, Task
from rookery.ui.live.folder import RunsFolder
from rookery.ui.live.reading import OpenRuns
from rookery.weights import read_adapter, write_adapter

ENGINE = {"model": "tiny", "cache_gib": 0.01}
TRAINING: dict[str, Any] = {"rank": 2, "layers": 1, "steps": 2, "batch_size": 4, "progress": False}
LAST_STEP = "checkpoints/adapter_step_2"
SCORER = """
def score(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
"""
DRAWN = {"scorer": {"type": "python", "function": "scorer.py:score"}, "sampling": {"max_tokens": 2}}


@pytest.fixture
def runs(place: Path) -> Path:
    """The folder to work in, with a scorer of drawn answers."""
    (place / "scorer.py").write_text(SCORER)
    return place


def genome(*paths: str, name: str, **tasks: Any) -> Path:
    taskset = {"type": "jsonl", "path": "tasks.jsonl", **tasks}
    config = {
        "engine": ENGINE,
        "init": {"type": "file", "path": list(paths)},
        "tasksets": [taskset],
        "stages": [{"type": "random", "count": 3}],
        "finals": {"num_finalists": 2, "num_voters": 2, "random_search": False},
    }
    return rookery.run_genome(config, name=name, progress=False).path


def grpo(name: str, *, path: str = "tasks.jsonl", fields: Any = None, **changes: Any) -> Path:
    config = {
        "engine": ENGINE,
        "tasksets": [{"type": "jsonl", "path": path, "fields": fields or {}, **DRAWN}],
        "steps": 2,
        "groups_per_step": 2,
        "group_size": 3,
        "drawing": {"max_tokens": 4},
        "save_every": 1,
        **({} if "init_from" in changes else {"lora": {"rank": 2, "layers": 1}}),
        **changes,
    }
    return rookery.run_grpo(config, name=name, progress=False).path


def test_an_adapter_of_each_loop_is_a_start_a_founder_and_measured(runs: Path) -> None:
    """sft -> genome -> sft -> grpo -> eval, and a page that shows the chain."""
    for seed, name in enumerate(("one", "two")):
        rookery.run_sft("tiny", "tasks.jsonl", name=name, seed=seed, **TRAINING)
    genome("run:one/trained", "run:two/trained", name="found")
    taught = rookery.run_sft(
        "tiny", "tasks.jsonl", name="last", init_from="run:found/winner", steps=1, progress=False
    )
    winner = read_adapter(runs / "runs/found/winner")
    assert taught.rank == winner.rank and taught.version != winner.version
    policy = grpo("policy", init_from="run:last/trained")
    assert read_adapter(policy / "trained").rank == winner.rank
    adapter = f"run:policy/{LAST_STEP}"
    measured = rookery.evaluate("tiny", "tasks.jsonl", adapters=[adapter], progress=False)
    assert measured.report.models[1].version == read_adapter(policy / LAST_STEP).version
    shown = OpenRuns(RunsFolder(runs / "runs")).get("last")
    [found] = shown.overview()["made_from"]
    assert (found["run"], found["part"], found["id"]) == ("found", "winner", "found")
    assert [(row["run"], row["made_from"]) for row in found["made_from"]] == [
        ("one", []),
        ("two", []),
    ]


def test_the_adapters_of_a_sweep_are_founders(runs: Path) -> None:
    grpo("policy", sweep={"seeds": 2})
    genome("run:policy/adapters", "a", name="of-sweep")
    assert len(list((runs / "runs/of-sweep/founders").iterdir())) == 3


def test_a_model_whose_weights_were_trained_is_a_model_everywhere(runs: Path) -> None:
    grpo("whole", full={}, lora={}, learning_rate=1e-3)
    model = "run:whole/trained"
    rookery.run_sft(model, "tasks.jsonl", name="s", **TRAINING)
    measured = rookery.evaluate(model, "tasks.jsonl", adapters=["run:s/trained"], progress=False)
    assert [row.name for row in measured.report.models] == ["base", "trained"]
    grpo("g", engine={**ENGINE, "model": model})


@pytest.fixture
def labels(runs: Path) -> dict[str, float]:
    """A run `labels`; the weight of each row that it left."""
    write_rows(runs / "items.jsonl", [{"id": f"i{i}", "a": 4 + i} for i in range(24)])
    data = {"path": "items.jsonl", "prompt": "w{{ a }} w20", "labels": ["w90", "w91"]}
    search = {"iterations": 10, "num_start": 4}
    config = {"engine": ENGINE, "data": data, "search": search}
    rookery.run_icm(config, name="labels", progress=False)
    lines = (runs / "runs/labels/sft.jsonl").read_text().splitlines()
    weights = {row["id"]: row["weight"] for row in map(json.loads, lines)}
    assert len(set(weights.values())) > 2
    return weights


def test_margins_weigh_what_is_trained(runs: Path, labels: dict[str, float]) -> None:
    taught = [
        rookery.run_sft("tiny", f"run:labels/sft.jsonl{options}", split="all", **TRAINING)
        for options in ("", "?fields.weight=weight")
    ]
    assert taught[0].version != taught[1].version
    trained = [
        read_adapter(grpo(name, path="run:labels/sft.jsonl", fields=own) / LAST_STEP)
        for name, own in (("plain", {}), ("sure", {"weight": "weight"}))
    ]
    assert trained[0].version != trained[1].version


def test_margins_weigh_the_tasks_of_a_search(runs: Path, labels: dict[str, float]) -> None:
    """Scores of the search are weighted means; the report counts every task alike."""
    fields = {"weight": "weight"}
    path = genome("a", "b", name="e", path="run:labels/sft.jsonl", fields=fields)
    rewards: dict[str, dict[str, float]] = {}
    with Run.view(path) as run:
        for event in run.events("rollout"):
            model, task = event.payload["model"].rpartition("@")[2], event.payload["task"]
            rewards.setdefault(model, {})[task.removeprefix("sft/")] = event.payload["reward"]
        found = [event.payload for event in run.events("candidate")]
    taskset = load_taskset_file(f"{runs}/runs/labels/sft.jsonl?fields.weight=weight")
    splits = {
        name: [task.id.removeprefix("sft/") for task in taskset.split(name)]
        for name in ("search", "report")
    }
    total = math.fsum(labels[task] for task in splits["search"])
    for candidate in found:
        own = rewards[candidate["version"]]
        mean = math.fsum(labels[task] * own[task] for task in splits["search"]) / total
        assert candidate["score"] == pytest.approx(mean)
    report = parse_genome_report(json.loads((path / "report.json").read_text()))
    own = rewards[read_adapter(path / "winner").version]
    assert report.rows[0].mean == pytest.approx(fmean(own[task] for task in splits["report"]))


async def test_an_adapter_is_a_model_of_the_service(runs: Path) -> None:
    """Merged once; started again it serves the same folder."""
    folder = f"{runs}/a"
    config = ServeConfig(
        port=0, anonymous=True, models={"tuned": folder, "tiny": str(runs / "tiny")},
        folder=runs / "serve", engine=EngineConfig(cache_gib=0.01),
    )  # fmt: skip
    for _ in range(2):
        async with serving(config) as url, aiohttp.ClientSession() as http:
            texts = []
            for model in ("tiny", "tuned"):
                body = {"model": model, "prompt": "w5 w6", "max_tokens": 1, "logprobs": 1,
                        "temperature": 0}  # fmt: skip
                async with http.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    texts.append((await answer.json())["choices"][0]["logprobs"]["token_logprobs"])
        assert texts[0] != texts[1]
    assert len(list((runs / "serve/merged").iterdir())) == 1
    async with open_engine(str(runs / "tiny")) as engine:
        ref = await engine.load(read_adapter(folder))
        template = load_template(runs / "tiny", chat=False)
        prompt = template.encode(Task(id="", prompt="w5 w6", reference=None))
        request = SampleRequest(
            model=ref, prompt=prompt, params=SamplingParams(max_tokens=1, temperature=0.0)
        )
        [[completion]] = await engine.sample([request])
    assert texts[1] == pytest.approx(completion.logprobs, abs=1e-4)


async def test_an_adapter_without_a_base_model_is_refused(tmp_path: Path) -> None:
    write_adapter(tiny_adapter("lone", base=""), tmp_path / "lone")
    config = ServeConfig(
        port=0, anonymous=True, models={"m": str(tmp_path / "lone")}, folder=tmp_path / "serve"
    )
    with pytest.raises(ConfigError, match="does not say its base model"):
        async with serving(config):
            pass


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_memory_that_a_step_freed_goes_back() -> None:
    """Pieces too small for a mapping of their own stay with the process until it is told."""
    pieces = [bytearray(100_000) for _ in range(4_000)]
    held = resident_bytes()
    kept = pieces[::100]
    del pieces
    assert resident_bytes() > held - 100e6, "the C library gives it back by itself"
    give_back_memory()
    assert resident_bytes() < held - 300e6 and len(kept) == 40


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
