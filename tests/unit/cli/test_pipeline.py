"""`rookery pipeline`: loops that feed each other, on the tiny model."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from driving import Command
from evolve_command import require_sandbox
from marks import long

from rookery.compose.steps import StepConfig
from rookery.runs import Run
from rookery.starters.number_changer import NAME, serve_number_changer

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


def test_a_step_of_an_earlier_pipeline_is_taken_only_if_it_is_the_same(
    rookery: Command, place: Path, held_out: Path
) -> None:
    assert rookery("pipeline", "run", write(place, {"first": student()}), "--name", "f").code == 0
    shutil.rmtree(place / "runs/f")
    other = write(place, {"first": student(seed=5)})
    ended = rookery("pipeline", "run", other, "--name", "f")
    assert ended.code == 2 and "was made with another seed" in ended.words
    shutil.rmtree(place / "runs/f")
    tasksets = [{"type": "jsonl", "path": "tasks.jsonl"}]
    values = {"engine": {"model": "tiny"}, "tasksets": tasksets}
    other_loop = {"first": {"loop": "grpo", "values": values}}
    ended = rookery("pipeline", "run", write(place, other_loop), "--name", "f")
    assert ended.code == 2 and "is a run of kind sft, and the step first of grpo" in ended.words


def test_what_was_made_from_a_step_that_is_gone_is_not_taken(
    rookery: Command, place: Path, held_out: Path
) -> None:
    assert rookery("pipeline", "run", write(place, steps()), "--name", "f").code == 0
    shutil.rmtree(place / "runs/f.first")
    ended = rookery("runs", "resume", "f")
    assert ended.code == 2 and "f.second was made from an earlier f.first" in ended.words
    assert not (place / "runs/f.first").exists()
    shutil.rmtree(place / "runs/f.second")
    assert rookery("runs", "resume", "f").code == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"first": student(init_from="run:second/trained"), "second": student()},
         "init_from of the step first takes from second, which is not an earlier step"),
        ({"first": student(), "second": student(init_from="run:frist/trained")},
         "init_from of the step second is run:frist/trained: there is no run"),
        ({"first": {"loop": "sfd"}}, "it should be 'evolve', 'genome', 'grpo', 'icm' or 'sft'"),
        ({"first": student(rnk=2)}, "the step first is not a valid config: rnk is not a key"),
        ({"../x": student()}, "Got the name of a step '../x'"),
        ({}, "should have at least 1 item"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_step(
    refused: Command, place: Path, held_out: Path, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused("pipeline", "run", write(place, change)).words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "nowhere/at/all"}, "There is no model folder nowhere/at/all"),
        ({"model": "nan-model"}, "and report.model is"),
        ({"adapters": ["a"]}, "report.adapters is set, and the report measures what the steps"),
        ({"weights": "int4", "dtype": "bfloat16"}, "weights is int4, which computes in float32"),
    ],
)
def test_a_report_that_cannot_be_is_refused_before_the_first_step(
    refused: Command, place: Path, held_out: Path, change: dict[str, Any], sentence: str
) -> None:
    path = write(place, {"first": student()})
    document = yaml.safe_load(path.read_text())
    document["report"] |= change
    path.write_text(yaml.safe_dump(document))
    assert sentence in refused("pipeline", "run", path).words


def test_a_step_called_base_has_a_file_with_its_own_paths_and_is_told_from_the_base_model(
    rookery: Command, place: Path, held_out: Path
) -> None:
    (place / "deep").mkdir()
    shutil.copy(place / "tasks.jsonl", place / "deep/mine.jsonl")
    values = student("mine.jsonl")["values"] | {"model": str(place / "tiny")}
    (place / "deep/sft.yaml").write_text(yaml.safe_dump(values))
    fed = {"loop": "sft", "config": "deep/fed.yaml"}
    (place / "deep/fed.yaml").write_text(yaml.safe_dump(values | {"init_from": "run:base/trained"}))
    path = write(place, {"base": {"loop": "sft", "config": "deep/sft.yaml"}, "b": fed})
    ended = rookery("pipeline", "run", path, "--name", "f")
    assert ended.code == 0, ended.err
    report = json.loads((place / "runs/f/report.json").read_text())
    assert [row["name"] for row in report["models"]] == ["base", "f.base", "b"]


def test_a_seen_task_is_refused_before_the_first_step_where_only_the_adapter_is_made(
    refused: Command, place: Path, held_out: Path
) -> None:
    later = student("held_out.jsonl", init_from="run:first/trained")
    ended = refused("pipeline", "run", write(place, {"first": student(), "second": later}))
    assert "report tasks are also data of the step second" in ended.words


def test_a_seen_task_is_known_as_a_chat_too(refused: Command, place: Path) -> None:
    turn = {"role": "user", "content": "2 + 2 =  ?"}
    for name, prompt in (
        ("seen", "2 + 2 = ?"),
        ("report", [{"role": "system", "content": "Be brief."}, turn]),
    ):
        row = {"prompt": prompt, "choices": ["4", "5"], "answer": "4"}
        (place / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    path = write(place, {"first": student("seen.jsonl", model="chat")}, report="report.jsonl")
    ended = refused("pipeline", "run", path)
    assert "1 of 1 report tasks are also data of the step first" in ended.words


def evolving(**changes: Any) -> dict[str, Any]:
    """An evolution of the program of `rookery new evolve`, proposed by a scripted model."""
    settings = {
        "max_iterations": 6,
        "diff_based_evolution": False,
        "evaluator": {"timeout": 20},
        "rookery": {"mode": "deterministic", "in_flight": 2},
        **changes.pop("settings", {}),
    }
    files = {"program": "mine/initial_program.py", "evaluator": "mine/evaluator.py"}
    return {"loop": "evolve", "values": {**files, **changes, "settings": settings}}


@long
def test_winners_of_evolve_train_the_next_proposer(rookery: Command, place: Path) -> None:
    require_sandbox()
    assert rookery("new", "evolve", "mine").code == 0
    engine = {"engine": {"model": "chat"}, "adapters": {"writer": "run:student/trained"}}
    values = {"model": "chat", "rank": 2, "layers": 1, "steps": 1, "batch_size": 1}
    student = {**values, "taskset": "run:first/winners.jsonl", "split": "all"}
    with serve_number_changer() as url:
        llm = {"primary_model": NAME, "api_base": url}
        steps = {
            "first": evolving(settings={"llm": llm}),
            "student": {"loop": "sft", "values": student},
            "second": evolving(
                program="run:first/best/best_program.py",
                settings={
                    "max_iterations": 2,
                    "llm": {"max_tokens": 4, "models": [{"name": "writer"}]},
                    "rookery": {"mode": "deterministic", **engine},
                },
            ),
        }
        path = place / "flow.yaml"
        path.write_text(yaml.safe_dump({"steps": steps}, sort_keys=False))
        ended = rookery("pipeline", "run", path, "--name", "flow")
    assert ended.code == 0, ended.err
    report = json.loads((place / "runs/flow/report.json").read_text())
    made_from = {step["name"]: step["made_from"] for step in report["steps"]}
    assert made_from == {
        "first": [],
        "student": ["flow.first"],
        "second": ["flow.first", "flow.student"],
    }
    first, second = (
        json.loads((place / f"runs/flow.{name}/report.json").read_text())
        for name in ("first", "second")
    )
    assert second["first"]["score"] == first["best"]["score"] > first["first"]["score"]
    assert [model["name"] for model in second["models"]] == ["writer"]
    rows = (place / "runs/flow.first/winners.jsonl").read_text().splitlines()
    assert [m["role"] for m in json.loads(rows[0])["messages"]] == ["system", "user", "assistant"]
    (place / "runs/flow/report.json").unlink()
    assert rookery("runs", "resume", "flow").code == 0


def test_a_step_whose_run_cannot_have_its_name_is_refused_before_the_first_one(
    refused: Command, place: Path, held_out: Path
) -> None:
    path = write(place, {"first": student(), "s" * 150: student()})
    ended = refused("pipeline", "run", path, "--name", "f" * 60)
    assert f"name of the run of the step {'s' * 150}" in ended.words


def test_a_step_that_was_refused_is_begun_again(rookery: Command, place: Path) -> None:
    """It leaves no run that would hold on to what was wrong."""
    scorer = "def score(task, completion):\n    return float(len(completion.tokens) > 1)\n"
    (place / "scorer.py").write_text(scorer.replace("return", "return wrong +"))
    (place / "prompt.txt").write_text("Answer.")
    taskset = {
        "type": "jsonl",
        "path": "tasks.jsonl",
        "scorer": {"type": "python", "function": "scorer.py:score"},
        "sampling": {"max_tokens": 2},
    }
    (place / "drawn.yaml").write_text(yaml.safe_dump(taskset))
    settings = {
        "max_iterations": 1,
        "llm": {"max_tokens": 4},
        "rookery": {"engine": {"model": "chat"}, "tasks": {"taskset": "drawn.yaml"}},
    }
    step = {"loop": "evolve", "values": {"program": "prompt.txt", "settings": settings}}
    path = place / "flow.yaml"
    path.write_text(yaml.safe_dump({"steps": {"only": step}}))
    ended = rookery("pipeline", "run", path, "--name", "flow")
    assert ended.code == 2 and "name 'wrong' is not defined" in ended.words
    (place / "scorer.py").write_text(scorer)
    assert rookery("runs", "resume", "flow").code == 0


DRAWN: dict[str, Any] = {
    "type": "jsonl",
    "path": "tasks.jsonl",
    "scorer": {"type": "python", "function": "scorer.py:score"},
    "sampling": {"max_tokens": 2},
}
SCORER = """
def score(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / max(len(completion.tokens), 1)
"""


def every_loop(place: Path) -> dict[str, Any]:
    """A step of each loop, with the files that it reads: most take from an earlier one too."""
    engine = {"model": "tiny", "cache_gib": 0.01}
    (place / "scorer.py").write_text(SCORER)
    items = [{"id": f"i{index}", "a": 4 + index} for index in range(8)]
    (place / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (place / "drawn.yaml").write_text(yaml.safe_dump(DRAWN))
    (place / "prompt.txt").write_text("Answer.")
    data = {"path": "items.jsonl", "prompt": "w{{ a }} w20", "labels": ["w90", "w91"]}
    search = {"iterations": 4, "num_start": 2}
    policy = {
        "engine": engine,
        "tasksets": [DRAWN],
        "steps": 1,
        "groups_per_step": 2,
        "group_size": 2,
        "drawing": {"max_tokens": 2},
        "init_from": "run:student/trained",
    }
    evolved = {
        "engine": engine,
        "tasksets": [{"type": "jsonl", "path": "tasks.jsonl"}],
        "init": {"type": "file", "path": ["a", "run:student/trained"]},
        "stages": [{"type": "random", "count": 1}],
        "finals": {"num_finalists": 1, "num_voters": 1, "random_search": False},
    }
    asked = {"engine": {"model": "chat"}, "tasks": {"taskset": "drawn.yaml"}}
    settings = {"max_iterations": 1, "llm": {"max_tokens": 4}, "rookery": asked}
    return {
        "labels": {"loop": "icm", "values": {"engine": engine, "data": data, "search": search}},
        "student": student("run:labels/sft.jsonl", split="all"),
        "policy": {"loop": "grpo", "values": policy},
        "evolved": {"loop": "genome", "values": evolved},
        "prompt": {"loop": "evolve", "values": {"program": "prompt.txt", "settings": settings}},
    }  # fmt: skip


MISSING = {
    "items.jsonl": "labels",
    "scorer.py": "policy",
    "a": "evolved",
    "prompt.txt": "prompt",
}
"""Files, and the first step that reads each."""


@pytest.mark.parametrize("missing", MISSING)
def test_what_any_step_misses_is_refused_before_the_first_one(
    refused: Command, place: Path, held_out: Path, missing: str
) -> None:
    path = write(place, every_loop(place))
    document = yaml.safe_load(path.read_text())
    del document["report"]
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    (place / missing).rename(place / "away")
    ended = refused("pipeline", "run", path, "--name", "flow")
    assert f"The step {MISSING[missing]} cannot be run: " in ended.words
    assert missing in ended.words


def test_data_that_change_between_two_steps_are_noticed(
    rookery: Command, place: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the pipeline is killed between them or goes on, and whether the step that reads them
    has ended or has not begun."""
    rows = (place / "tasks.jsonl").read_text()
    (place / "tasks.jsonl").unlink()
    (place / "tasks.jsonl").write_text(rows)
    (place / "others.jsonl").write_text(rows)
    path = write(place, {"first": student(), "second": student("others.jsonl")})

    from rookery.ui.steps import Steps

    def edit(_: Steps, name: str) -> None:
        if name == "first":
            (place / "others.jsonl").write_text(rows.replace("w90", "w89"))

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "end", edit)
        ended = rookery("pipeline", "run", path, "--name", "f")
    changed = "changed since runs/f was started, and what it recorded belongs to the former"
    for again in (ended, rookery("runs", "resume", "f")):
        assert again.code == 2
        assert f"The data of others {changed}" in again.words.replace(f"{place}/", "")
        assert not (place / "runs/f.second").exists()
    (place / "others.jsonl").write_text(rows)
    (place / "tasks.jsonl").write_text(rows.replace("w90", "w89"))
    ended = rookery("runs", "resume", "f")
    assert ended.code == 2 and "The data of tasks changed since" in ended.words
    assert "f.first was started" in ended.words and not (place / "runs/f.second").exists()
    (place / "tasks.jsonl").write_text(rows)
    assert rookery("runs", "resume", "f").code == 0


def test_report_tasks_that_change_while_the_steps_run_are_noticed(
    rookery: Command, place: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = held_out.read_text()

    from rookery.ui.steps import Steps

    with monkeypatch.context() as patch:
        edited = rows.replace("w91", "w92")
        patch.setattr(Steps, "end", lambda *_: held_out.write_text(edited))
        ended = rookery("pipeline", "run", write(place, {"first": student()}), "--name", "f")
    for again in (ended, rookery("runs", "resume", "f")):
        assert again.code == 2 and "The data of held_out changed since" in again.words
    held_out.write_text(rows)
    assert rookery("runs", "resume", "f").code == 0


def test_a_step_of_any_loop_is_known_by_the_data_it_reads(rookery: Command, place: Path) -> None:
    """The digests that a pipeline has of its steps are those that they have of themselves."""
    require_sandbox()
    path, flow = place / "flow.yaml", every_loop(place)
    loops = get_args(StepConfig.model_fields["loop"].annotation)
    assert {step["loop"] for step in flow.values()} == set(loops)
    path.write_text(yaml.safe_dump({"steps": flow}, sort_keys=False))
    ended = rookery("pipeline", "run", path, "--name", "flow")
    assert ended.code == 0, ended.err
    known = json.loads((place / "runs/flow/steps.json").read_text())
    read = {
        name: json.loads((place / f"runs/flow.{name}/inputs.json").read_text()) for name in known
    }
    made = {"student": {"sft"}, "evolved": {"init"}}
    for name, own in read.items():
        assert known[name] == {key: own[key] for key in own if key not in made.get(name, ())}
    assert rookery("runs", "resume", "flow").code == 0


def test_who_runs_a_pipeline_of_this_name_is_said(
    rookery: Command, place: Path, held_out: Path
) -> None:
    with Run.create(place / "runs", kind="pipeline", config={}, name="f"):
        ended = rookery("pipeline", "run", write(place, steps()), "--name", "f")
    assert ended.code == 2 and f"runs/f is in use by process {os.getpid()}" in ended.words
