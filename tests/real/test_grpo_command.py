"""`rookery grpo run`, killed while it scores, and `rookery runs resume`: the same weights.

Games, gradients of many passes, and two processes of torchrun. Some minutes on an idle core:

    ROOKERY_LONG=1 pytest tests/real/test_grpo_command.py
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loops.test_grpo_resume import trained_positions
from marks import long
from tiny import write_tiny_model

from rookery.runs import Run

pytestmark = long

JUDGES = """\
import os, signal

left = int(os.environ.get("KILL_IN", "0"))

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def reward(task, completion):
    count()
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)

async def play(task, chat):
    first = await chat(task.prompt)
    count()
    second = await chat("w9")
    return len(set(second) - set(first)) + chat.seed % 7 / 100
"""
CONFIG = """\
engine: {model: tiny, cache_gib: 0.01}
lora: {rank: 2, targets: [q_proj, down_proj]}
steps: 8
groups_per_step: 2
group_size: 3
drawing: {max_tokens: 4}
learning_rate: 1.0e-2
save_every: 2
keep: 1
"""
SCORED = "{type: jsonl, path: tasks.jsonl, sampling: {max_tokens: 4}%s}"
SCORER = ", scorer: {type: python, function: 'judges.py:reward'}"
GAME = "environment: {type: python, function: 'judges.py:play'}\n"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
KINDS: dict[str, tuple[str, ...]] = {
    "accumulated": ("--trainer.pass-tokens", "8"),
    "game": ("--staleness", "1"),
    "lora in processes": ("--staleness", "1"),
    "full in processes": ("--full", "--learning-rate", "1e-3"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(24)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"g.yaml": (SCORED % SCORER, ""), "game.yaml": (SCORED % "", GAME)}
    for name, (taskset, game) in tasks.items():
        (tmp_path / name).write_text(f"{CONFIG}tasksets: [{taskset}]\n{game}")
    return tmp_path


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_killed_goes_on_to_the_same_weights(place: Path, kind: str) -> None:
    has_processes = "processes" in kind
    config = "game.yaml" if kind == "game" else "g.yaml"

    def run(*words: str, kill_in: int = 0) -> int:
        start = TORCHRUN if has_processes else ()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "KILL_IN": str(kill_in)}
        command = [sys.executable, *start, "-m", "rookery", *words]
        ended = subprocess.run(command, cwd=place, env=environment, timeout=300, check=False)
        return ended.returncode

    words = ("grpo", "run", config, *KINDS[kind])
    assert run(*words, "--name", "whole") == 0
    killed = 1 if has_processes else -signal.SIGKILL  # torchrun tells of it
    assert run(*words, "--name", "killed", kill_in=40) == killed
    with Run.view(place / "runs/killed") as view:
        assert 1 < len(trained_positions(view)) < 8  # on its way, behind a checkpoint
    assert run("runs", "resume", "killed") == 0
    [whole, again] = [Run.view(place / "runs" / name) for name in ("whole", "killed")]
    with whole, again:
        assert trained_positions(again) == trained_positions(whole)
    for name in ("trained", "checkpoints"):
        files = {
            path.relative_to(place / "runs/whole"): path.read_bytes()
            for path in (place / "runs/whole" / name).rglob("*.safetensors")
        }
        assert files
        for path, content in files.items():
            assert (place / "runs/killed" / path).read_bytes() == content, path
