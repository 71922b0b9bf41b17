"""`rookery genome run` on a tiny config, from end to end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Command, change_weights, status_of

from rookery.config import load_config
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
    ended = rookery("genome", "run", "g.yaml", "--seed", "3", "--name", "x")
    assert ended.code == 0
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
        assert run.status == "finished" and run.config["seed"] == 3


def test_resuming_changes_nothing_and_takes_no_other_config(rookery: Command, config: Path) -> None:
    assert rookery("genome", "run", "g.yaml", "--name", "x").code == 0
    folder = config / "runs/x"
    before = json.loads((folder / "report.json").read_text())
    with Run.view(folder) as run:
        num_answers = run.counts()["rollout"]
    assert rookery("genome", "run", "g.yaml", "--name", "x", "--resume").code == 0
    assert rookery("runs", "resume", "x").code == 0
    after = json.loads((folder / "report.json").read_text())
    same = {"rows", "lineage", "winner_id", "num_rollouts", "num_tokens", "generations"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    with Run.view(folder) as run:
        assert run.counts()["rollout"] == num_answers
    ended = rookery("genome", "run", "g.yaml", "--name", "x", "--resume", "--seed", "9")
    assert ended.code == 2 and "seed is 0 there and 9 here" in ended.err
    ended = rookery("genome", "run", "g.yaml", "--resume")
    assert ended.code == 2 and "--resume needs the run: add --name NAME" in ended.err
    ended = rookery("genome", "run", "g.yaml", "--name", "y", "--resume")
    assert ended.code == 2 and "There is no run runs/y" in ended.err


@pytest.mark.parametrize(
    ("changed", "name"),
    [("own/tiny/model.safetensors", "the model"), ("mine/a/adapter_model.safetensors", "init")],
)
def test_a_run_does_not_go_on_with_other_weights(
    rookery: Command, config: Path, changed: str, name: str
) -> None:
    shutil.copytree(config / "tiny", config / "own/tiny")
    shutil.copytree(config / "founders", config / "mine")
    words = ("--engine.model", "own/tiny", "--init.path", "mine")
    assert rookery("genome", "run", "g.yaml", "--name", "x", *words).code == 0
    change_weights(config / changed)
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and f"The data of {name} changed since" in ended.words
    assert status_of(config / "runs/x") == "finished", "a refusal leaves it as it was"


def test_overrides_of_every_spelling(rookery: Command, config: Path) -> None:
    ended = rookery(
        "genome", "run", "g.yaml", "seed=4", "--race.enabled=false", "--stages.0.generations", "1",
        "--finals.num-finalists", "1", "--name", "x",
    )  # fmt: skip
    assert ended.code == 0
    kept = json.loads((config / "runs/x/config.json").read_text())
    assert kept["seed"] == 4 and kept["race"]["enabled"] is False
    assert kept["stages"][0]["generations"] == 1 and kept["finals"]["num_finalists"] == 1
    assert Path(kept["init"]["path"]).is_absolute()


def test_paths_are_relative_to_the_config_and_those_of_flags_to_the_user(
    rookery: Command, config: Path
) -> None:
    folder = config / "configs"
    folder.mkdir()
    moved = CONFIG.replace("path: founders", "path: ../founders")
    (folder / "g.yaml").write_text(moved.replace("path: tasks.jsonl", "path: ../tasks.jsonl"))
    assert rookery("genome", "run", "configs/g.yaml", "--name", "x").code == 0
    flags = ["--init.path", "founders", "--tasksets.0.path", "tasks.jsonl"]
    assert rookery("genome", "run", "configs/g.yaml", "--name", "y", *flags).code == 0
    used = [json.loads((config / "runs" / name / "config.json").read_text()) for name in "xy"]
    for kept in used:
        assert Path(kept["init"]["path"]).samefile(config / "founders")
        assert Path(kept["tasksets"][0]["path"]).samefile(config / "tasks.jsonl")


def test_founders_made_of_nothing(rookery: Command, config: Path) -> None:
    ended = rookery(
        "genome", "run", "g.yaml", "--init", "{type: random, count: 2, rank: 2, size: 0.05}",
        "--stages.0.generations", "1", "--name", "x",
    )  # fmt: skip
    assert ended.code == 0
    assert len(list((config / "runs/x/founders").iterdir())) == 2


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
