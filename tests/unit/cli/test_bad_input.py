"""Bad input: each a sentence that says what to do, code 2, and nothing left behind."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driving import NUM_TASKS, Command, tree

from rookery.runs import Run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["./tinny", "tasks.jsonl"], "There is no model folder ./tinny."),
        (["founders", "tasks.jsonl"], "is not a model folder: it has no config.json."),
        (["nosuch", "tasks.jsonl"],
         r"'nosuch' is not a folder here and cannot be fetched .*[^.]\. Check the name"),
        (["no such", "tasks.jsonl"], "'no such' is neither a folder here nor a Hugging Face id"),
        (["nan-model", "tasks.jsonl"], "is broken: .* holds NaN or infinity."),
        (["tiny", "task.jsonl"], r"There is no taskset task.jsonl. Did you mean \S*tasks.jsonl"),
        (["tiny", "empty.jsonl"], "has no rows; a taskset needs at least one."),
        (["tiny", "generated:arithmetc"], "Did you mean arithmetic?"),
        (["tiny", "tasks.jsonl", "--adapter", "other"], "was made for 'someone/llama-9000'"),
        (["tiny", "tasks.jsonl", "--adapter", "nan-adapter"], "holds NaN or infinity"),
        (["tiny", "tasks.jsonl", "--adapter", "founders"], "has no adapter_config.json"),
        (["tiny", "tasks.jsonl", "--adapter", "gone"], "gone has no adapter_config.json"),
        (["tiny", "tasks.jsonl", "--runs-dir", "tasks.jsonl"],
         "Runs cannot be kept in tasks.jsonl: .*tasks.jsonl is a file."),
        (["tiny", "tasks.jsonl", "--runs-dir", "tasks.jsonl/x"], "tasks.jsonl is a file."),
        (["tiny", "tasks.jsonl", "--runs-dir", "/proc/no/runs"], "/proc/no"),
        (["tiny", "tasks.jsonl", "--name", "a/b"], "Got the name of a run 'a/b'"),
        (["tiny", "tasks.jsonl", "--device", "tpu"],
         'Invalid value "tpu" for --device. Choose from: "auto", "cpu", "cuda".'),
        (["tiny", "tasks.jsonl", "--device", "cuda"], "torch sees no GPU here: write cpu or auto"),
    ],
)  # fmt: skip
def test_evaluations_that_cannot_be(
    refused: Command, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert re.search(sentence.replace("?", r"\?"), refused("eval", *words).words)


LONG = "a prompt " * 40


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "tiny", LONG], "cannot be read: File name too long."),
        (["eval", "~no-such-user/x", "tasks.jsonl"], "is not a path: "),
        (["eval", "tiny", "tasks.jsonl", "--adapter", LONG], "File name too long."),
        (["eval", "tiny", "tasks.jsonl", "--name", "n" * 300], "one word of at most 200 letters"),
        (["eval", "tiny", f"tasks.jsonl?prompt_template={LONG}&limit=0"], "limit is 0"),
        (["evolve", "run", LONG, "evaluator.py"], "File name too long."),
        (["evolve", "prompt", LONG, "--taskset", "tasks.jsonl", "--model", "tiny"],
         "File name too long."),
        (["runs", "show", LONG], "File name too long."),
        (["new", "genome", LONG], "File name too long."),
        (["ui", "--port", "70000"], "--port is 70000; ports are 0,"),
        (["ui", "tasks.jsonl"], "tasks.jsonl is a file: give the folder"),
        (["fleet", "status", "gpu1:8000"], "write http://gpu1:8000."),
        (["fleet", "restore", "http://gpu1:70000"], "'http://gpu1:70000': Port out of range"),
    ],
)  # fmt: skip
def test_names_that_nothing_can_have(refused: Command, words: list[str], sentence: str) -> None:
    assert re.search(sentence, refused(*words).words)


@pytest.mark.parametrize("command", ["eval", "doctor"])
def test_a_cache_that_is_a_file(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (place / "file").touch()
    monkeypatch.setenv("ROOKERY_CACHE", str(place / "file"))
    words = ["eval", "smollm2", "tasks.jsonl"] if command == "eval" else ["doctor"]
    ended = rookery(*words)
    assert ended.code == 2
    assert str(place / "file") in ended.words and "ROOKERY_CACHE" in ended.words
    assert not (place / "runs").exists()


def test_a_name_that_is_taken_is_refused_before_anything_is_read(
    rookery: Command, place: Path
) -> None:
    assert rookery("eval", "tiny", "tasks.jsonl", "--limit", "1", "--name", "x").code == 0
    before = tree(place)
    ended = rookery("eval", "nan-model", "tasks.jsonl", "--name", "x")
    assert ended.code == 2
    assert {path for path in tree(place) - before if "events.db-" not in path} == set()
    assert "runs/x already holds a run" in ended.err and "rookery runs resume runs/x" in ended.err


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """Files longer than this cannot be written: like a disk that is full, for one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_in_the_middle_loses_nothing(rookery: Command, place: Path) -> None:
    assert rookery("eval", "tiny", "tasks.jsonl", "--name", "whole", "--adapter", "a").code == 0
    with small_files(70_000):  # enough for the files of a run, too little for all of its answers
        ended = rookery("eval", "tiny", "tasks.jsonl", "--name", "x", "--adapter", "a")
    assert ended.code == 2 and "the disk is full" in ended.err
    assert not (place / "runs/x/report.json").exists()
    with Run.view(place / "runs/x") as run:
        assert run.counts().get("rollout", 0) < 2 * NUM_TASKS
    assert rookery("runs", "resume", "x").code == 0
    reports = [(place / f"runs/{name}/report.json").read_text() for name in ("whole", "x")]
    parts = [text.split('"seconds"')[0].partition('"model"')[2] for text in reports]
    assert parts[0] == parts[1] != ""


GENOME = """\
engine: {model: tiny}
init: {type: file, path: founders}
tasksets: [{type: jsonl, path: tasks.jsonl}]
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("populaton: 3", "populaton is not a key."),
        ("stages: [{type: ga, generatons: 3}]",
         "stages.0.generatons is not a key. Did you mean generations?"),
        ("stages: [{type: gaa}]",
         "stages.0.type is \"gaa\"; it should be 'ga', 'es', 'cmaes', 'random' or 'surrogate'."),
        ("init: {type: file, path: nowhere}", "There is no folder"),
        ("init: {type: file, path: tiny}", "holds no adapters"),
        ("init: {type: zero, targets: [nope]}", "No linear layer is called nope"),
        ("engine: {model: ./nowhere}", "There is no model folder ./nowhere"),
        ("engine: {model: nan-model}", "holds NaN or infinity"),
        ("engine: {model: tiny, cache_gib: 900000}", "Write a smaller one"),
        ("engine: {model: tiny, max_rank: 2}", "raise engine.max_rank to 4, or give a lower"),
        ("tasksets: [{type: jsonl, path: empty.jsonl}]", "has no rows"),
        ("tasksets: [{type: jsonl, path: tasks.jsonl}, {type: jsonl, path: tasks.jsonl}]",
         "Two tasksets are called 'tasks'"),
        ("tasksets: [{type: jsonl, path: tasks.jsonl, limit: 2}]", "split"),
        ("tasksets: [{type: jsonl, path: tasks.jsonl, scorer: {type: python, function: 'x.py:f'}}]",
         "There is no scorer file"),
        ("- a list", "does not parse"),
    ],
)  # fmt: skip
def test_evolutions_that_cannot_be(
    refused: Command, place: Path, change: str, sentence: str
) -> None:
    key = change.partition(":")[0]
    kept = [line for line in GENOME.splitlines() if not line.startswith(f"{key}:")]
    (place / "g.yaml").write_text("\n".join([*kept, change]) + "\n")
    assert sentence in refused("genome", "run", "g.yaml").words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nan-model", "tasks.jsonl", "out"], "holds NaN or infinity"),
        (["tiny", "empty.jsonl", "out"], "has no rows"),
        (["tiny", "long.jsonl", "out", "--split", "all"], "this model reads at most 128"),
        (["tiny", "tasks.jsonl", "out", "--init-from", "other"], "was made for"),
        (["tiny", "tasks.jsonl", "out", "--targets", "[nope]"], "targets names 'nope'"),
        (["tiny", "tasks.jsonl", "out", "--rank", "0"], "rank is 0; it should be greater"),
        (["tiny", "tasks.jsonl", "founders"], "exists and is not an adapter folder"),
        (["tiny", "tasks.jsonl", "tasks.jsonl"], "exists and is not an adapter folder"),
        (["tiny", "tasks.jsonl", "tasks.jsonl/x"], "tasks.jsonl is a file"),
    ],
)
def test_trainings_that_cannot_be(refused: Command, words: list[str], sentence: str) -> None:
    assert sentence in refused("sft", *words, "--steps", "2").words


def test_a_folder_that_may_not_be_written(
    refused: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer of the system is put in its place."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    ended = refused("eval", "tiny", "tasks.jsonl")
    assert "Runs cannot be kept in runs:" in ended.err and "may not be written" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "serve.yaml"),
        ("fleet", "up", "run:nowhere/trained"),
        ("fleet", "verify", "http://127.0.0.1:9", "--adapter", "run:nowhere/winner"),
        ("evolve", "check", "run:nowhere/best/best_program.py", "evaluator.py"),
    ],
)
def test_every_command_looks_for_what_a_run_left(
    refused: Command, place: Path, words: tuple[str, ...]
) -> None:
    (place / "serve.yaml").write_text("models: {mine: run:nowhere/trained}\n")
    assert "there is no run" in refused(*words).words
