"""`rookery eval`: tables, JSON, splits, what is kept, what fails alone."""

import asyncio
import json
from pathlib import Path

import pytest
from driving import NUM_TASKS, Command, write_rows
from marks import needs_int4
from tiny import write_tiny_model
from ui.made_runs import read_saved

from rookery.embedded import EngineConfig, open_engine
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.tasks.taskset import load_taskset_file
from rookery.tasks.template import load_template
from rookery.types import Evaluation, SampleRequest
from rookery.weights import read_adapter


async def measure(folder: Path, *adapters: str) -> list[Evaluation]:
    taskset = load_taskset_file(str(folder / "tasks.jsonl"))
    async with open_engine(EngineConfig(model=str(folder / "tiny"))) as engine:
        models = [engine.base, *[await engine.load(read_adapter(folder / a)) for a in adapters]]
        evaluator = TasksetEvaluator(
            engine, template=load_template(folder / "tiny"), tasksets=[taskset]
        )
        return await evaluator.evaluate(models, taskset.tasks)


def test_the_report_is_printed_and_kept(rookery: Command, place: Path) -> None:
    ended = rookery(
        "eval", "tiny", "tasks.jsonl", "--adapter", "a", "--adapter", "b", "--name", "one", "--json"
    )
    assert ended.code == 0 and ended.err == ""
    report = ended.document
    assert report == json.loads((place / "runs/one/report.json").read_text())
    assert report["num_tasks"] == NUM_TASKS and report["taskset"] == "tasks"
    assert [row["name"] for row in report["models"]] == ["base", "a", "b"]
    expected = asyncio.run(measure(place, "a", "b"))
    for row, evaluation in zip(report["models"], expected, strict=True):
        assert row["mean"] == sum(evaluation.rewards.values()) / NUM_TASKS
        assert row["low"] < row["mean"] < row["high"]
        assert (row["num_scored"], row["num_failed"]) == (NUM_TASKS, 0)
    base, *others = report["models"]
    assert "gain" not in base
    for row in others:
        gain = row["gain"]
        assert gain["mean"] == pytest.approx(row["mean"] - base["mean"])
        assert gain["low"] <= gain["mean"] <= gain["high"]
    with Run.view(place / "runs/one") as run:
        assert run.status == "finished" and run.counts()["rollout"] == 3 * NUM_TASKS


@needs_int4
def test_the_report_names_weights_of_four_bits(rookery: Command, place: Path) -> None:
    asked = ("eval", "tiny", "tasks.jsonl", "--adapter", "a", "--json", "--name")
    plain = rookery(*asked, "plain").document
    ended = rookery(*asked, "rounded", "--weights", "int4")
    assert ended.code == 0 and plain["warnings"] == []
    assert "int4 weights" in ended.document["warnings"][0]
    assert json.loads((place / "runs/rounded/config.json").read_text())["weights"] == "int4"
    assert {row["num_scored"] for row in ended.document["models"]} == {NUM_TASKS}


def test_weights_of_four_bits_are_refused_in_another_type(refused: Command, place: Path) -> None:
    ended = refused("eval", "tiny", "tasks.jsonl", "--weights", "int4", "--dtype", "bfloat16")
    assert "computes in float32 on the CPU, with device auto and dtype bfloat16" in ended.words


def test_an_adapter_of_any_rank_is_measured(rookery: Command, place: Path) -> None:
    assert read_adapter(place / "wide").rank > EngineConfig().max_rank
    ended = rookery("eval", "tiny", "tasks.jsonl", "--adapter", "wide", "--limit", "2", "--json")
    assert ended.code == 0 and ended.document["models"][1]["num_scored"] == 2


def test_the_table_holds_the_numbers_of_the_report_which_has_every_answer(
    rookery: Command, place: Path
) -> None:
    """The prompt, the reference, and what each model answered, in the report and on the page."""
    ended = rookery("eval", "tiny", "tasks.jsonl", "--adapter", "a", "--name", "one")
    report = json.loads((place / "runs/one/report.json").read_text())
    assert f"tasks: {NUM_TASKS} tasks" in ended.out
    for row in report["models"]:
        assert f"{row['mean']:.3f} │ {row['low']:.3f} to {row['high']:.3f}" in ended.out
    assert f"{report['models'][1]['gain']['mean']:+.3f} (" in ended.out
    assert f"run      {place / 'runs/one'}\n" in ended.out, "a path is never folded"
    assert f"answers  {place / 'runs/one/report.html'}\n" in ended.out
    with Run.view(place / "runs/one") as run:
        texts = {
            (event.payload["model"], event.payload["task"]): event.payload["completion"]["text"]
            for event in run.events("rollout")
        }
    tasks = {task.id: task for task in load_taskset_file("tasks.jsonl").tasks}
    assert {row["task"] for row in report["tasks"]} == set(tasks)
    saved = read_saved((place / "runs/one/report.html").read_text())
    assert saved["answers"]["runs/one/report"]["tasks"] == report["tasks"]
    for row in report["tasks"]:
        assert row["prompt"] == tasks[row["task"]].prompt
        assert row["reference"] == tasks[row["task"]].reference
        assert [answer["name"] for answer in row["answers"]] == ["base", "a"]
        drawn = {texts[key] for key in texts if key[1] == row["task"]}
        assert {answer["text"] for answer in row["answers"]} == drawn


def test_rows_of_one_question_are_one_cluster(rookery: Command, place: Path) -> None:
    rows = [json.loads(line) for line in (place / "tasks.jsonl").read_text().splitlines()]
    grouped = [{**row, "topic": i // 5} for i, row in enumerate(rows)]
    write_rows(place / "grouped.jsonl", grouped)
    many = rookery("eval", "tiny", "grouped.jsonl", "--json").document
    few = rookery("eval", "tiny", "grouped.jsonl?fields.group=topic", "--json").document
    assert many["num_tasks"] == few["num_tasks"] == many["num_questions"] == NUM_TASKS
    assert few["num_questions"] == -(-NUM_TASKS // 5)
    [one], [other] = many["models"], few["models"]
    assert other["mean"] == one["mean"] and other["low"] < one["low"] < one["high"] < other["high"]
    shown = rookery("eval", "tiny", "grouped.jsonl?fields.group=topic")
    assert f"{few['num_questions']} questions ({NUM_TASKS} rows)" in shown.out


def test_splits_and_limits(rookery: Command, place: Path) -> None:
    tasks = load_taskset_file("tasks.jsonl").split("select")
    whole = rookery("eval", "tiny", "tasks.jsonl", "--split", "select", "--json", "--name", "x")
    assert whole.document["num_tasks"] == len(tasks) < NUM_TASKS
    few = rookery("eval", "tiny", "tasks.jsonl", "--split", "select", "--limit", "2", "--json")
    assert few.document["num_tasks"] == 2 == few.document["models"][0]["num_scored"]
    with Run.view(place / "runs/x") as run:
        assert {e.payload["task"] for e in run.events("rollout")} == {t.id for t in tasks}


def test_options_may_follow_the_name_of_a_file(rookery: Command, place: Path) -> None:
    few = rookery("eval", "tiny", "tasks.jsonl?limit=3", "--json", "--name", "x")
    assert few.document["num_tasks"] == 3
    kept = json.loads((place / "runs/x/config.json").read_text())["taskset"]
    assert kept == f"{place / 'tasks.jsonl'}?limit=3", "a run is resumed from any folder"


def test_tasks_that_fail_are_told_and_the_others_count(rookery: Command, place: Path) -> None:
    ended = rookery("eval", "tiny", "long.jsonl", "--name", "long")
    assert ended.code == 2
    assert (
        "error: base: 1 tasks failed. A prompt has 300 tokens; this model reads at most 128: "
        "shorten it." in ended.err
    )
    [row] = json.loads((place / "runs/long/report.json").read_text())["models"]
    assert (row["num_scored"], row["num_failed"]) == (3, 1) and "mean" in row


def test_when_nothing_could_be_scored_there_is_no_number(rookery: Command, place: Path) -> None:
    write_rows(place / "all.jsonl", [{"prompt": "w5 " * 300, "reference": "w9"}])
    ended = rookery("eval", "tiny", "all.jsonl", "--name", "none")
    [row] = json.loads((place / "runs/none/report.json").read_text())["models"]
    assert ended.code == 2 and "mean" not in row and row["num_scored"] == 0
    assert "│ base  │        - │             - │" in ended.out


def test_names_with_brackets_are_names(rookery: Command, place: Path) -> None:
    """Square brackets are markup to the terminal library."""
    strange = place / "[bold]x[/nothing]"
    strange.mkdir(parents=True)  # the slash makes it two folders
    (strange / "tasks[a].jsonl").symlink_to(place / "tasks.jsonl")
    (strange / "[red]").symlink_to(place / "a", target_is_directory=True)
    (strange / "[b").symlink_to(place / "tiny", target_is_directory=True)
    ended = rookery(
        "eval", strange / "[b", strange / "tasks[a].jsonl", "--adapter", strange / "[red]",
        "--limit", "2", "--runs-dir", strange, "--name", "r",
    )  # fmt: skip
    assert ended.code == 0
    assert "tasks[a]: 2 tasks" in ended.out and "│ [red] │" in ended.out
    assert f"run      {strange / 'r'}\n" in ended.out
    assert str(strange) in rookery("runs", "show", strange / "r").out
    assert str(strange) in rookery("runs", "list", "--runs-dir", strange / "none").out


def test_adapters_of_one_name_are_told_apart_by_their_paths(rookery: Command, place: Path) -> None:
    (place / "deep").mkdir()
    (place / "deep" / "a").symlink_to(place / "b", target_is_directory=True)
    ended = rookery(
        "eval", "tiny", "tasks.jsonl", "--adapter", "a", "--adapter", "deep/a", "--limit", "2",
        "--json",
    )  # fmt: skip
    names = [row["name"] for row in ended.document["models"]]
    assert names == ["base", str(place / "a"), str(place / "deep/a")]


def test_what_has_no_score_is_scored_again_on_request(
    rookery: Command, place: Path, drawn: list[SampleRequest]
) -> None:
    (place / "mine.py").write_text(
        "from pathlib import Path\n"
        "def reward(task, completion):\n"
        "    with open('calls', 'a') as calls: calls.write(task.id + '\\n')\n"
        "    if task.id.endswith('1') and Path('down').exists(): raise OSError('no answer')\n"
        "    return 1\n"
    )
    (place / "set.yaml").write_text(
        "type: jsonl\npath: tasks.jsonl\nsampling: {max_tokens: 2}\n"
        "scorer: {type: python, function: 'mine.py:reward'}\n"
    )
    (place / "down").touch()
    assert "no answer" in rookery("eval", "tiny", "set.yaml", "--name", "x").words
    calls, num_drawn = (place / "calls").read_text().split(), len(drawn)
    (place / "down").unlink()
    report = rookery("runs", "resume", "x")
    assert "no answer" in report.words, "what failed stays so"
    assert rookery("runs", "resume", "x", "--rescore").code == 0
    again = (place / "calls").read_text().split()[len(calls) :]
    assert again and all(id.endswith("1") for id in again) and len(drawn) == num_drawn


def test_other_options_of_a_scorer_score_the_same_answers(
    rookery: Command, place: Path, drawn: list[SampleRequest]
) -> None:
    text = (
        "type: jsonl\npath: tasks.jsonl\nsampling: {max_tokens: 2}\n"
        "scorer: {type: regex, pattern: 'w1'}\n"
    )
    (place / "set.yaml").write_text(text)
    assert rookery("eval", "tiny", "set.yaml", "--name", "x").code == 0
    num_drawn = len(drawn)
    (place / "set.yaml").write_text(text.replace("w1", "w[0-9]"))
    assert rookery("runs", "resume", "x").code == 2
    assert rookery("runs", "resume", "x", "--rescore").code == 0
    assert len(drawn) == num_drawn
    [row] = json.loads((place / "runs/x/report.json").read_text())["models"]
    assert row["mean"] == 1.0
    (place / "set.yaml").write_text(text)
    assert rookery("runs", "resume", "x", "--rescore").code == 0 and len(drawn) == num_drawn


def test_a_taskset_may_be_called_as_other_inputs_are(rookery: Command, place: Path) -> None:
    tasks = place / "adapters.jsonl"
    tasks.write_text((place / "tasks.jsonl").read_text())
    rookery("eval", "tiny", "adapters.jsonl", "--adapter", "a", "--name", "x")
    tasks.write_text(tasks.read_text().replace("w4 w5", "w5 w4", 1))
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "The data of adapters changed" in ended.err


def test_a_resumed_report_counts_what_was_asked_before(rookery: Command, place: Path) -> None:
    rookery("eval", "tiny", "tasks.jsonl", "--name", "x")
    first = json.loads((place / "runs/x/report.json").read_text())
    assert rookery("runs", "resume", "x").code == 0
    again = json.loads((place / "runs/x/report.json").read_text())
    assert again["seconds"] > first["seconds"]
    assert again["tokens"]["asked_and_answered"] >= 3 * NUM_TASKS
    assert again["models"] == first["models"]


def test_a_report_says_when_answers_depend_on_their_batch(rookery: Command, place: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    write_tiny_model(place / "moe", "Mixtral", **experts)
    said = "The model is a mixture of experts: the last bits of an answer depend on"
    ended = rookery("eval", "moe", "tasks.jsonl", "--json")
    assert ended.code == 0 and ended.document["warnings"][0].startswith(said)
    assert said in next((place / "runs").glob("*/report.html")).read_text()
    assert rookery("eval", "tiny", "tasks.jsonl", "--json").document["warnings"] == []
