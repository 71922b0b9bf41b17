"""`rookery grpo run` on a tiny config, from end to end, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from driving import Command, write_rows
from peft import PeftModel
from tiny import write_tiny_model
from transformers import (
    AutoModelForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rookery.runs import Run
from rookery.types import SampleRequest
from rookery.weights import read_adapter

REWARD = """\
def reward(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)

def no_number(task, completion):
    return float("nan")

def always_equal(task, completion):
    return 0.5
"""
GAME = """\
async def play(task, chat):
    first = await chat(task.prompt)
    second = await chat("w9")
    return {"reward": len(set(second) - set(first)), "letters": len(first)}

def plain(task, chat):
    return 1.0
"""
CONFIG = """\
engine: {model: tiny, cache_gib: 0.01}
tasksets: [{type: jsonl, path: drawn.jsonl, sampling: {max_tokens: 3},
            scorer: {type: python, function: 'reward.py:reward'}}]
lora: {rank: 2, targets: [q_proj]}
steps: 2
groups_per_step: 2
group_size: 3
drawing: {max_tokens: 3}
save_every: 2
"""


@pytest.fixture
def config(place: Path) -> Path:
    (place / "g.yaml").write_text(CONFIG)
    (place / "reward.py").write_text(REWARD)
    (place / "game.py").write_text(GAME)
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(24)]
    write_rows(place / "drawn.jsonl", rows)
    return place


def test_from_end_to_end(rookery: Command, config: Path) -> None:
    flags = ("--seed", "3", "--share", "true", "--staleness", "1")
    ended = rookery("grpo", "run", "g.yaml", "--name", "x", *flags)
    assert ended.code == 0
    folder = config / "runs/x"
    report = json.loads((folder / "report.json").read_text())
    assert report["kind"] == "grpo" and report["seed"] == 3 and len(report["steps"]) == 2
    assert read_adapter(folder / "trained").factors
    page = (folder / "report.html").read_text()
    assert page.lstrip().startswith("<!doctype html>") and "Engine/trainer gap" in page
    assert "sampled" not in report["rows"][0], "several answers to a task are for who asks"
    for words in ("tasks that the training never saw", "trained", "base model"):
        assert words in ended.out
    assert f"trained  {folder / 'trained'}\n" in ended.out
    with Run.view(folder) as run:
        assert run.status == "finished"


GAME_FLAGS = (
    "--tasksets", "[{type: jsonl, path: drawn.jsonl, sampling: {max_tokens: 3, temperature: 0.5}}]",
    "--environment", "{type: python, function: 'game.py:play'}",
)  # fmt: skip

KL = ("--loss", "{type: grpo, kl: {weight: 0.1}}")


def test_a_game_from_end_to_end(rookery: Command, config: Path) -> None:
    """Its rows have no reference: the game judges."""
    write_rows(config / "drawn.jsonl", [{"prompt": f"w{4 + i} w6"} for i in range(24)])
    ended = rookery("grpo", "run", "g.yaml", "--name", "x", *GAME_FLAGS, "--drawing.top-p", "0.8")
    assert ended.code == 0
    folder = config / "runs/x"
    report = json.loads((folder / "report.json").read_text())
    assert report["game"].endswith("game.py:play")
    assert report["tasksets"][0]["temperature"] == 0.5
    assert "game/letters" in report["steps"][0]["metrics"]
    page = (folder / "report.html").read_text()
    assert "at temperature 0.5" in page and "game.py:play" in page
    assert rookery("runs", "resume", "x").code == 0


def test_a_start_is_reported_beside_the_base(rookery: Command, config: Path) -> None:
    """And is kept in the run, which goes on when its folder is gone."""
    shutil.copytree(config / "a", config / "own")
    assert rookery("grpo", "run", "g.yaml", "--name", "x", "--init-from", "own").code == 0
    shutil.rmtree(config / "own")
    assert rookery("runs", "resume", "x").code == 0
    report = json.loads((config / "runs/x/report.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["trained", "start", "base model"]
    assert read_adapter(config / "runs/x/start").version == read_adapter(config / "a").version
    prompts = {
        row["prompt"] for row in map(json.loads, (config / "tasks.jsonl").read_text().splitlines())
    }
    examples = [example for step in report["steps"] for example in step["examples"]]
    assert {example["prompt"] for example in examples} <= prompts, "an answer beside its question"


def test_a_model_is_trained_whole(rookery: Command, config: Path) -> None:
    """And the next run starts from what this one trained."""
    flags = ("--full.layers", "2", *KL)
    first = rookery("grpo", "run", "g.yaml", "--name", "x", "--lora.rank", "3", *flags)
    assert first.code == 0 and "lora has no effect: full trains all weights" in first.err
    trained = config / "runs/x/checkpoints/step_2"
    assert AutoModelForCausalLM.from_pretrained(trained)
    before = json.loads((config / "runs/x/report.json").read_text())
    assert rookery("runs", "resume", "x").code == 0
    after = json.loads((config / "runs/x/report.json").read_text())
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    words = ("grpo", "run", "g.yaml", "--name", "y", "--init-from", trained, *flags)
    assert rookery(*words).code == 0
    report = json.loads((config / "runs/y/report.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["trained", "start", "base model"]
    assert report["model"] == before["model"]
    assert report["steps"][0]["metrics"]["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert report["steps"][1]["metrics"]["train/kl"] > 0


def test_the_reference_of_the_kl_term_is_a_folder(rookery: Command, config: Path) -> None:
    """An adapter, or a model: PEFT's merge of the same adapter gives the same divergence."""
    model = AutoModelForCausalLM.from_pretrained(config / "tiny")
    PeftModel.from_pretrained(model, config / "a").merge_and_unload().save_pretrained("merged")

    def divergence(name: str, *flags: str) -> float:
        words = ("grpo", "run", "g.yaml", "--name", name, "--steps", "1", *KL, *flags)
        ended = rookery(*words)
        assert ended.code == 0, ended.words
        report = json.loads((config / "runs" / name / "report.json").read_text())
        return float(report["steps"][0]["metrics"]["train/kl"])

    expected = divergence("adapter", "--reference", "a")
    assert expected > 1e-4
    flags = ("--full", "--reference", "merged")
    assert divergence("full-merged", *flags) == pytest.approx(expected, rel=1e-3)
    assert divergence("start", "--init-from", "a") == pytest.approx(0.0, abs=1e-9)
    shutil.copytree(config / "b", config / "own")
    divergence("changed", "--reference", "own")
    shutil.rmtree(config / "own")
    shutil.copytree(config / "a", config / "own")
    ended = rookery("runs", "resume", "changed")
    assert ended.code == 2 and "The data of reference changed" in ended.words


def test_a_model_without_a_decoder_is_refused(rookery: Command, config: Path) -> None:
    """In a sentence of ours: transformers names two hundred other types."""
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(config / "t5")
    for path in (config / "tiny").glob("tokenizer*"):
        shutil.copy(path, config / "t5")
    for command in ("run", "plan"):
        ended = rookery("grpo", command, "g.yaml", "--engine.model", "t5")
        sentence = "a model of the type t5, which does not continue texts: take a decoder"
        assert ended.code == 2 and sentence in ended.words
        assert len(ended.words) < 600 and not (config / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--group-size", "1"), "write 2 or more"),
        (("--lora.targets", "[q_prj]"), "Did you mean q_proj?"),
        (("--lora.rank", "70"), "lora.rank is 70, and the engine takes adapters up to rank 64"),
        (("--loss", "{type: grpo, clip: 0.3}"), "clip"),
        (("--loss", "{type: grop}"), "grop"),
        (("--tasksets.0.splits", "{search: 0, select: 0.5, report: 0.5}"), "search split"),
        (("--tasksets.0.splits", "{search: 0.5, select: 0, report: 0.5}"), "select split"),
        (("--tasksets", "[{type: jsonl, path: tasks.jsonl}]"), "has choices to be scored"),
        (("--tasksets.0.path", "empty.jsonl"), "has no rows"),
        (("--environment", "{function: 'game.py:play'}"), "a taskset has a scorer and environment"),
        ((*GAME_FLAGS[:3], "{function: 'game.py:plain'}"), "write async def"),
        ((*GAME_FLAGS[:3], "{function: 'game.py:pay'}"), "its functions are plain, play"),
        ((*GAME_FLAGS[:3], "{function: 'gone.py:play'}"), "There is no game file"),
        (("--drawing.top-p", "0"), "top_p"),
        (("--init-from", "nowhere"), "nowhere"),
        (("--init-from", "other"), "llama-9000"),
        (("--full", "--init-from", "a"), "an adapter, and full trains all weights"),
        (("--full", "--init-from", "nowhere"), "not a model folder: it has no config.json"),
        (("--full", "--init-from", "narrow"), "(32, 48) there and (32, 64) in the engine"),
        (("--full", "--init-from", "tiny", "--share", "--publish-every", "2"), "share: false"),
        (("--tasksets.0.scorer.function", "reward.py:no_number"), "returned nan (float)"),
        (("--tasksets.0.scorer.function", "reward.py:always_equal"), "the mean reward is 0.5"),
        (("--reference", "a"), "the loss has no KL term to it: write loss.kl"),
        ((*KL, "--reference", "nowhere"), "nowhere"),
        ((*KL, "--reference", "other"), "llama-9000"),
        ((*KL, "--reference", "short"), "with a vocabulary of 90 tokens"),
        (("--full.layers", "9"), "layers is 9; this model has 4"),
        (("--full.optimizer", "sgd"), "adamw"),
        (("--engine.device", "cuda"), "device is cuda, but torch sees no GPU here: write cpu"),
    ],
)
def test_bad_input_is_refused_before_a_run_is_made(
    rookery: Command, config: Path, flags: tuple[str, ...], sentence: str
) -> None:
    if "short" in flags:
        write_tiny_model(config / "short", vocab_size=90)
    if "narrow" in flags:
        write_tiny_model(config / "narrow", intermediate_size=48)
    ended = rookery("grpo", "run", "g.yaml", "--name", "x", *flags)
    assert ended.code == 2 and sentence in ended.words
    assert not (config / "runs/x").exists()


def test_a_run_goes_on_with_another_scorer_when_told_so(
    rookery: Command, config: Path, drawn: list[SampleRequest]
) -> None:
    assert rookery("grpo", "run", "g.yaml", "--name", "x").code == 0
    first = json.loads((config / "runs/x/report.json").read_text())
    (config / "reward.py").write_text(REWARD.replace("% 2 == 0", "% 2 == 1"))
    drawn.clear()
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "the scorer of drawn changed since" in ended.words
    assert rookery("runs", "resume", "x", "--rescore").code == 0
    assert drawn == []
    again = json.loads((config / "runs/x/report.json").read_text())
    means = {
        step["step"]: (step["mean"], other["mean"])
        for step, other in zip(first["checkpoints"], again["checkpoints"], strict=True)
    }
    assert set(means) == {0, 2}
    assert all(even + odd == pytest.approx(1) for even, odd in means.values())
    assert any("scored again after 2 steps were drawn" in words for words in again["warnings"])


def test_a_game_that_changed_is_played_again_when_told_so(rookery: Command, config: Path) -> None:
    assert rookery("grpo", "run", "g.yaml", "--name", "x", *GAME_FLAGS).code == 0
    (config / "game.py").write_text(GAME.replace('"w9"', '"w8"'))
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "the game changed since" in ended.words
    assert rookery("runs", "resume", "x", "--rescore").code == 0
