"""`rookery pipeline`: loops that feed each other, on the tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from driving import Command

from rookery.runs import Run

SFT: dict[str, Any] = {
    "loop": "sft",
    "values": {"model": "tiny", "rank": 2, "layers": 1, "steps": 2},
}


@pytest.fixture
def held_out(place: Path) -> Path:
    rows = [
        {"prompt": f"v{index} v{index + 1}", "choices": ["w90", "w91"], "answer": "w90"}
        for index in range(8)
    ]
    path = place / "held_out.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write(place: Path, steps: dict[str, Any], report: str = "held_out.jsonl") -> Path:
    document = {"steps": steps, "report": {"model": "tiny", "taskset": report}}
    path = place / "flow.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def student(taskset: str = "tasks.jsonl", **values: Any) -> dict[str, Any]:
    return {**SFT, "values": {**SFT["values"], "taskset": taskset, **values}}


def steps() -> dict[str, Any]:
    return {"first": student(), "second": student(init_from="run:first/trained", seed=1)}


def test_steps_are_runs_and_the_report_measures_each(
    rookery: Command, place: Path, held_out: Path
) -> None:
    ended = rookery("pipeline", "run", write(place, steps()), "--name", "flow")
    assert ended.code == 0, ended.err
    report = json.loads((place / "runs/flow/report.json").read_text())
    assert [row["name"] for row in report["models"]] == ["base", "first", "second"]
    assert report["num_tasks"] == 8 and report["kind"] == "pipeline"
    assert [(step["run"], step["made_from"]) for step in report["steps"]] == [
        ("flow.first", []),
        ("flow.second", ["flow.first"]),
    ]
    assert "flow.first" in rookery("runs", "list").out
    assert "second" in (place / "runs/flow/report.html").read_text()


def test_an_interrupted_pipeline_goes_on_with_its_step(
    rookery: Command, place: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(place, steps())
    assert rookery("pipeline", "run", whole, "--name", "whole").code == 0

    from rookery.compose import sft

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sft, "SftReport", press)
        assert rookery("pipeline", "run", whole, "--name", "cut").code == 130
    assert not (place / "runs/cut.second").exists()
    assert rookery("runs", "resume", "cut").code == 0
    adapters = [place / f"runs/{name}.second/trained" for name in ("whole", "cut")]
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in adapters]
    assert weights[0] == weights[1]
    with Run.view(place / "runs/cut.first") as run:
        assert sum(event.kind == "run/opened" for event in run.events()) == 1, "resumed, not anew"


def test_a_step_of_an_earlier_pipeline_is_taken_only_if_it_is_the_same(
    rookery: Command, place: Path, held_out: Path
) -> None:
    assert rookery("pipeline", "run", write(place, {"first": student()}), "--name", "f").code == 0
    shutil.rmtree(place / "runs/f")
    other = write(place, {"first": student(seed=5)})
    ended = rookery("pipeline", "run", other, "--name", "f")
    assert ended.code == 2 and "was made with another seed" in ended.words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"first": student(init_from="run:second/trained"), "second": student()},
         "init_from of the step first takes from second, which is not an earlier step"),
        ({"first": {"loop": "sfd"}}, "it should be 'genome', 'grpo', 'icm' or 'sft'"),
        ({"first": student(rnk=2)}, "the step first is not a valid config: rnk is not a key"),
        ({"../x": student()}, "Got the name of a step '../x'"),
        ({}, "should have at least 1 item"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_step(
    refused: Command, place: Path, held_out: Path, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused("pipeline", "run", write(place, change)).words


def test_a_step_has_a_file_of_its_own_with_its_own_paths(
    rookery: Command, place: Path, held_out: Path
) -> None:
    (place / "deep").mkdir()
    shutil.copy(place / "tasks.jsonl", place / "deep/mine.jsonl")
    values = student("mine.jsonl")["values"] | {"model": str(place / "tiny")}
    (place / "deep/sft.yaml").write_text(yaml.safe_dump(values))
    fed = {"loop": "sft", "config": "deep/fed.yaml"}
    (place / "deep/fed.yaml").write_text(yaml.safe_dump(values | {"init_from": "run:a/trained"}))
    path = write(place, {"a": {"loop": "sft", "config": "deep/sft.yaml"}, "b": fed})
    ended = rookery("pipeline", "run", path, "--name", "flow")
    assert ended.code == 0, ended.err


def test_tasks_that_a_step_sees_are_refused_for_the_report(refused: Command, place: Path) -> None:
    path = write(place, {"first": student()}, report="tasks.jsonl")
    ended = refused("pipeline", "run", path)
    assert "tasks of the report are among those of the step first" in ended.words
