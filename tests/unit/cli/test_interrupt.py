"""Ctrl-C in the middle: code 130, the command that goes on, and the same report in the end."""

import json
import signal
import time
from pathlib import Path

import pytest
from driving import Command, write_rows
from forked import Forked, forked, run_command

from rookery.errors import RunError
from rookery.runs import Run

NUM_TASKS, NUM_FREE = 150, 128

SCORER = f"""
import asyncio, os

async def reward(task, completion):
    number = int(task.id.rpartition("/")[2])
    if "ROOKERY_TEST_HANGS" in os.environ and number >= {NUM_FREE}:
        await asyncio.sleep(3600)
    with open("judged.txt", "a") as file:
        file.write(task.id + "\\n")
    return float(len(completion.tokens)) / 4
"""

TASKSET = """
type: jsonl
path: rows.jsonl
scorer: {type: python, function: 'scorer.py:reward'}
sampling: {max_tokens: 4, temperature: 1.0}
"""


@pytest.fixture
def slow(place: Path) -> Path:
    """A taskset whose last answers take an hour to judge, while a variable is set."""
    rows = [{"id": str(i), "prompt": f"w{4 + i % 90} w{4 + i % 7}", "reference": ""}
            for i in range(NUM_TASKS)]  # fmt: skip
    write_rows(place / "rows.jsonl", rows)
    (place / "slow.yaml").write_text(TASKSET)
    (place / "scorer.py").write_text(SCORER)
    return place


def rollouts(path: Path) -> int:
    try:
        with Run.view(path) as run:
            return run.counts().get("rollout", 0)
    except RunError:
        return 0


def wait_for_rollouts(process: Forked, path: Path, num: int) -> None:
    deadline = time.monotonic() + 120
    while rollouts(path) < num:
        assert not process.has_ended, "it ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_evaluation_interrupted_and_resumed(rookery: Command, slow: Path) -> None:
    command = ("eval", "tiny", "slow.yaml", "--name", "x")
    variables = {"ROOKERY_TEST_HANGS": "1"}
    with forked(run_command, slow / "errors", *command, variables=variables) as process:
        wait_for_rollouts(process, slow / "runs/x", NUM_FREE)
        process.send(signal.SIGINT)
        assert process.wait() == 130 and process.lines.read() == ""
    err = (slow / "errors").read_text()
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last == f"error: Interrupted. Go on with: rookery runs resume {slow / 'runs/x'}"
    assert rollouts(slow / "runs/x") == NUM_FREE and not (slow / "runs/x/report.json").exists()
    with Run.view(slow / "runs/x") as run:
        assert run.status == "interrupted"

    assert rookery(*last.partition("rookery ")[2].split()).code == 0
    assert rollouts(slow / "runs/x") == NUM_TASKS
    judged = (slow / "judged.txt").read_text().split()
    assert sorted(judged) == sorted({f"rows/{i}" for i in range(NUM_TASKS)}), "nothing twice"

    assert rookery("eval", "tiny", "slow.yaml", "--name", "whole").code == 0
    resumed, whole = (
        json.loads((slow / f"runs/{name}/report.json").read_text()) for name in ("x", "whole")
    )
    for key in ("model", "taskset", "num_tasks", "models"):
        assert resumed[key] == whole[key]


def test_interrupted_before_there_is_a_run(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rookery.compose.evaluation.load_taskset_file", press)
    ended = rookery("eval", "tiny", "tasks.jsonl", "--name", "x")
    assert ended.code == 130 and ended.err == "" and not (place / "runs").exists()


def test_a_path_with_spaces_is_quoted_in_the_hint(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rookery.rollout.TasksetEvaluator.evaluate", press)
    ended = rookery("eval", "tiny", "tasks.jsonl", "--name", "x", "--runs-dir", "my runs")
    assert ended.code == 130
    assert f"Go on with: rookery runs resume '{place / 'my runs/x'}'" in ended.err
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert rookery("runs", "resume", place / "my runs/x").code == 0
