"""`rookery genome run` on a tiny config, from end to end."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from driving import Command, write_rows
from ui.made_runs import read_saved

from rookery.config import load_config
from rookery.loops.comparison import best_of
from rookery.loops.genome import GenomeConfig
from rookery.runs import Run
from rookery.types import SampleRequest
from rookery.weights import read_adapter

CONFIG = """\
engine: {model: tiny}
init: {type: file, path: founders}
tasksets: [{type: jsonl, path: tasks.jsonl}]
stages: [{type: ga, generations: 2, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2, random_search: false}
"""


@pytest.fixture
def config(place: Path) -> Path:
    (place / "g.yaml").write_text(CONFIG)
    return place


def test_from_end_to_end(rookery: Command, config: Path) -> None:
    """Paths of the config are relative to it, those of flags to the user."""
    (config / "configs").mkdir()
    moved = CONFIG.replace("path: founders", "path: ../founders")
    (config / "configs/g.yaml").write_text(moved)
    flags = (
        "seed=3", "--race.enabled=false", "--finals.num-finalists", "1",
        "--tasksets.0.path", "tasks.jsonl", "--stages.0.generations", "1",
    )  # fmt: skip
    ended = rookery("genome", "run", "configs/g.yaml", "--name", "x", *flags)
    assert ended.code == 0, ended.err
    folder = config / "runs/x"
    report = json.loads((folder / "report.json").read_text())
    assert report["seed"] == 3 and report["winner_id"]
    assert read_adapter(folder / "winner").factors
    assert {path.name for path in (folder / "founders").iterdir()} == {"a", "b"}
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "tasks that the search never saw" in ended.out
    for label in ("evolved", "best founder", "base model"):
        assert label in ended.out
    assert f"winner  {folder / 'winner'}\n" in ended.out
    assert f"report  {folder / 'report.html'}\n" in ended.out
    with Run.view(folder) as run:
        assert run.status == "finished"
    kept = json.loads((folder / "config.json").read_text())
    assert kept["seed"] == 3 and kept["race"]["enabled"] is False
    assert kept["stages"][0]["generations"] == 1 and kept["finals"]["num_finalists"] == 1
    assert Path(kept["init"]["path"]).samefile(config / "founders")
    assert Path(kept["tasksets"][0]["path"]).samefile(config / "tasks.jsonl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed_before_the_run_is_made(
    rookery: Command, config: Path
) -> None:
    ended = rookery("genome", "run", "g.yaml", "--merge-device", "cuda", "--name", "x")
    assert ended.code == 2 and "write merge_device: cpu" in ended.err
    assert not (config / "runs/x").exists()


def test_the_documented_flags_fit_the_documented_config(place: Path) -> None:
    """The page's config is the default search, whose first stage has no generations."""
    page = (Path(__file__).parents[3] / "docs" / "genome.md").read_text()
    (place / "mine.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    [line] = [line for line in page.splitlines() if line.startswith("rookery genome run mine.yaml")]
    config = load_config(GenomeConfig, place / "mine.yaml", overrides=line.split()[4:])
    default = GenomeConfig.model_fields["stages"].default
    assert config.stages == (default[0], default[1].model_copy(update={"generations": 20}))
    assert config.merit == GenomeConfig.model_fields["merit"].default and config.seed == 3


def test_a_mended_scorer_scores_the_answers_again(
    rookery: Command, config: Path, drawn: list[SampleRequest]
) -> None:
    text = CONFIG.replace(
        "path: tasks.jsonl",
        "path: tasks.jsonl, sampling: {max_tokens: 3}, "
        "scorer: {type: python, function: 'mine.py:reward'}",
    )
    (config / "g.yaml").write_text(text)
    (config / "mine.py").write_text("def reward(task, completion): return completion.txt")
    ended = rookery("genome", "run", "g.yaml", "--name", "x")
    assert ended.code == 2 and "All 2 founders failed" in ended.words
    num_first = len(drawn)
    (config / "mine.py").write_text("def reward(task, completion): return completion.tokens[0] % 2")
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "the scorer of tasks changed since" in ended.words
    assert "runs/x --rescore" in ended.words and len(drawn) == num_first
    assert rookery("runs", "resume", "x", "--rescore").code == 0
    num_both = len(drawn)
    assert rookery("runs", "resume", "x").code == 0, "the run now is one of the mended scorer"
    assert rookery("genome", "run", "g.yaml", "--name", "y").code == 0
    assert num_both == len(drawn) - num_both, "what the founders answered was not drawn again"
    again, fresh = (
        json.loads((config / f"runs/{name}/report.json").read_text()) for name in ("x", "y")
    )
    for key in ("rows", "lineage", "winner_id", "num_rollouts"):
        assert strip_seconds(again[key]) == strip_seconds(fresh[key])


def strip_seconds(value: Any) -> Any:
    if isinstance(value, list):
        return [strip_seconds(each) for each in value]
    if isinstance(value, dict):
        return {key: strip_seconds(each) for key, each in value.items() if key != "seconds"}
    return value


# Several answers to each report task.


REWARD = """\
def reward(task, completion):
    return float(completion.tokens[0] % 2 == 0)
"""
TASKSET = """\
{type: jsonl, path: drawn.jsonl, sampling: {max_tokens: 2},
 scorer: {type: python, function: 'reward.py:reward'}}
"""
GRPO = f"""\
engine: {{model: tiny, cache_gib: 0.01}}
tasksets: [{TASKSET}]
lora: {{rank: 2, targets: [q_proj]}}
steps: 1
groups_per_step: 2
group_size: 4
drawing: {{max_tokens: 2, temperature: 0.9}}
save_every: 1
report: {{samples: 4}}
"""
DRAWN_GENOME = f"""\
engine: {{model: tiny}}
init: {{type: file, path: founders}}
tasksets: [{TASKSET}]
stages: [{{type: ga, generations: 1, population: {{size: 2, children: {{count: 2}}}}}}]
finals: {{num_finalists: 2, num_voters: 2, random_search: false}}
report: {{samples: 4}}
"""


@pytest.fixture
def drawn_config(place: Path) -> Path:
    (place / "grpo.yaml").write_text(GRPO)
    (place / "genome.yaml").write_text(DRAWN_GENOME)
    (place / "taskset.yaml").write_text(TASKSET)
    (place / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(40)]
    write_rows(place / "drawn.jsonl", rows)
    return place


def test_the_estimate_is_the_mean_over_all_ways_to_take_k() -> None:
    random = Random(3)
    for num in (2, 3, 8):
        for rewards in (
            [float(random.random() < 0.3) for _ in range(num)],
            [random.uniform(-1.0, 2.0) for _ in range(num)],
        ):
            for k in range(1, num + 1):
                every = fmean(max(taken) for taken in combinations(rewards, k))
                assert best_of(rewards, k) == pytest.approx(every)


def expected(folder: Path, version: str) -> dict[str, float]:
    """Pass@1, pass@4 and the majority of one model, from the run's answers alone."""
    groups: dict[str, list[tuple[float, str]]] = {}
    with Run.view(folder) as run:
        drawn = _drawn(run, 4)
        for event in run.events("rollout"):
            model, task = event.payload["model"], event.payload["task"]
            if str(model).endswith(version) and event.key.rpartition("|")[0] in drawn:
                text = event.payload["completion"]["text"]
                groups.setdefault(task, []).append((event.payload["reward"], text))
    assert groups and all(len(own) == 4 for own in groups.values())

    def majority(own: list[tuple[float, str]]) -> float:
        [(text, _), *_] = Counter(text for _, text in own).most_common()
        return next(reward for reward, other in own if other == text)

    return {
        "1": fmean(fmean(reward for reward, _ in own) for own in groups.values()),
        "4": fmean(any(reward for reward, _ in own) for own in groups.values()),
        "majority": fmean(majority(own) for own in groups.values()),
    }


def _drawn(run: Any, num: int) -> set[str]:
    """Questions with so many answers."""
    counts = Counter(event.key.rpartition("|")[0] for event in run.events("rollout"))
    return {question for question, count in counts.items() if count == num}


@pytest.mark.parametrize(
    ("words", "rows", "temperature"),
    [
        (("grpo", "run", "grpo.yaml"), "rows", 0.9),
        (("genome", "run", "genome.yaml"), "rows", 1.0),
        (("eval", "tiny", "taskset.yaml", "--adapter", "a", "--samples", "4"), "models", 1.0),
    ],
)
def test_each_loop_that_draws_reports_them(
    rookery: Command,
    drawn_config: Path,
    drawn: list[SampleRequest],
    words: tuple[str, ...],
    rows: str,
    temperature: float,
) -> None:
    ended = rookery(*words, "--name", "x")
    assert ended.code == 0, ended.err
    report = json.loads((drawn_config / "runs/x/report.json").read_text())
    own = [row for row in report[rows] if "sampled" in row]
    assert len(own) >= 2 and "pass@4" in ended.words and "majority of 4" in ended.words
    shown = read_saved((drawn_config / "runs/x/report.html").read_text())["answers"][
        "runs/x/report"
    ]
    assert "pass@4" in shown["sampled"]["columns"] and len(shown["sampled"]["rows"]) == len(own)
    for row in own:
        sampled = row["sampled"]
        assert set(sampled["pass_at"]) == {"1", "2", "4"} and sampled["num"] == 4
        means = [sampled["pass_at"][k]["mean"] for k in ("1", "2", "4")]
        assert means == sorted(means)
        for one in (*sampled["pass_at"].values(), sampled["majority"]):
            assert one["low"] <= one["mean"] <= one["high"]
    asked = [request for request in drawn if request.params.n == 4]
    assert {request.params.temperature for request in asked} == {temperature}
    base = next(row for row in own if row["name"].startswith("base"))["sampled"]
    found = {**base["pass_at"], "majority": base["majority"]}
    [version] = {r.model.version for r in asked if r.model.version.endswith("tiny")}
    for key, value in expected(drawn_config / "runs/x", version).items():
        assert found[key]["mean"] == pytest.approx(value)
    # A run that goes on draws nothing again.
    drawn.clear()
    assert rookery("runs", "resume", "runs/x").code == 0 and not drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("grpo", "run", "grpo.yaml", "--report.samples", "1"), "report.samples is 1"),
        (("eval", "tiny", "taskset.yaml", "--samples", "0"), "report.samples is 0"),
    ],
)
def test_fewer_than_two_are_refused(
    refused: Command, drawn_config: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(*words).words
