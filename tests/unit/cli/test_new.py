"""`rookery new`: every project runs as it is, here with the tiny model in place of SmolLM2."""

import shlex
from pathlib import Path

import pytest
from driving import Command
from marks import long

from rookery.cli.demo import Kind

ENGINE = ("--engine.model", "tiny", "--engine.cache-gib", "0.01")
FLAGS: dict[Kind, tuple[str, ...]] = {
    "genome": ENGINE,
    "grpo": ENGINE,
    "game": ENGINE,
    "league": (
        *ENGINE,
        *("--num-seeds", "1", "--entrants", "[es, best_of_n]"),
        *("--budget.max-answer-tokens", "200"),
    ),
    "icm": (*ENGINE, "--data.labels", "[w90, w91]", "--data.gold", "null"),
}
"""The tiny model is no SmolLM2, and knows neither True nor False."""


def written(rookery: Command, kind: Kind) -> list[str]:
    """Write the project `mine`; the words of the command that is printed as the next one."""
    ended = rookery("new", kind, "mine")
    assert ended.code == 0
    files, command = ended.out.splitlines()
    assert all((Path("mine") / name).stat().st_size for name in files.split(": ")[1].split(", "))
    program, *words = shlex.split(command.removeprefix("Next: "))
    assert program == "rookery"
    return words


@pytest.mark.parametrize("kind", FLAGS)
def test_a_project_of_a_loop_runs_as_it_is(rookery: Command, place: Path, kind: Kind) -> None:
    ended = rookery(*written(rookery, kind), *FLAGS[kind], "--name", "first")
    assert ended.code == 0, ended.err
    assert (place / "runs/first/report.html").exists()


def test_a_scorer_is_measured(rookery: Command, place: Path) -> None:
    words = [{"smollm2": "tiny"}.get(word, word) for word in written(rookery, "scorer")]
    ended = rookery(*words, "--json")
    assert ended.code == 0, ended.err
    [row] = ended.document["models"]
    assert row["num_failed"] == 0 and 0 < row["mean"] <= 1


def test_a_prompt_evolves(rookery: Command, place: Path) -> None:
    words = (*written(rookery, "prompt"), "--model", "chat", "--llm.max-tokens", "8", "-o", "out")
    ended = rookery(*words)
    assert ended.code == 0, ended.err
    assert (place / "out/report.html").exists() and (place / "out/best/best_program.txt").exists()
    assert "No prompt was chosen over the first one" in ended.words
    assert "report tasks are read once" in rookery(*words, "-i", "2").words


@long
def test_a_flywheel_turns(rookery: Command, place: Path) -> None:
    words = written(rookery, "flywheel")
    config = place / "mine/config.yaml"
    text = config.read_text().replace("smollm2", str(place / "chat"))
    config.write_text(
        text.replace("max_tokens: 128", "max_tokens: 4").replace(
            "max_iterations: 12", "max_iterations: 5"
        )
    )
    reward = "def score(task, completion):\n    return sum(completion.tokens) % 97 / 97\n"
    (place / "mine/scorer.py").write_text(reward)  # that gibberish may improve
    ended = rookery(*words, "--name", "fw")
    assert ended.code == 0, ended.err
    assert (place / "runs/fw.second/best/best_program.txt").exists()
    assert "fw.first, fw.writer" in ended.words


@long
def test_a_sweeps_adapters_are_founders(rookery: Command, place: Path) -> None:
    words = written(rookery, "sweep")
    for name in ("config.yaml", "taskset.yaml"):
        file = place / "mine" / name
        text = file.read_text().replace("smollm2", str(place / "chat"))
        exact = "{type: exact, ignore_case: true, ignore_punctuation: true}"
        text = text.replace(exact, "{type: python, function: scorer.py:score}")
        file.write_text(text.replace("steps: 8", "steps: 1").replace("layers: 8", "layers: 1"))
    reward = "def score(task, completion):\n    return sum(completion.tokens) % 97 / 97\n"
    (place / "mine/scorer.py").write_text(reward)  # that gibberish may improve
    ended = rookery(*words, "--name", "sw")
    assert ended.code == 0, ended.err
    assert len(list((place / "runs/sw.evolved/founders").iterdir())) == 4
    assert "sw.sweep" in ended.words


@pytest.mark.parametrize("folder", ["founders", "tasks.jsonl"])
def test_what_is_there_is_left_alone(refused: Command, folder: str) -> None:
    ended = refused("new", "genome", folder)
    assert f"{folder} is there and not an empty folder" in ended.words
    assert "rookery new genome my-genome" in ended.words


def test_an_empty_folder_is_filled_and_an_unknown_kind_gets_a_hint(
    rookery: Command, place: Path
) -> None:
    (place / "mine").mkdir()
    written(rookery, "icm")
    assert 'Choose from: "genome"' in rookery("new", "genom", "other").words
