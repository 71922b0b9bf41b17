"""Ctrl-C and SIGTERM end a command in order, with the command that goes on to the same report; a
second signal kills at once."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from driving import Command, write_rows
from forked import Forked, forked, run_code, run_command
from marks import long

from rookery.compose.running import run_async
from rookery.errors import RunError
from rookery.runs import Run
from rookery.runtime.stopping import Stopped, run_stoppable, stop_signals

NUM_TASKS, NUM_FREE = 150, 128

SCORER = f"""
import asyncio, os
from pathlib import Path

async def reward(task, completion):
    number, mode = int(task.id.rpartition("/")[2]), os.environ.get("ROOKERY_TEST_MODE")
    if mode and number >= {NUM_FREE}:
        Path("waits").touch()
        try:
            await asyncio.sleep(3600)
        finally:
            Path("cancelled").touch()
            if mode == "stubborn":
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


def wait_for(process: Forked, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert not process.has_ended, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def running(slow: Path, mode: str) -> Iterator[Forked]:
    """An evaluation all of whose answers are judged but those that take an hour."""
    command = ("eval", "tiny", "slow.yaml", "--name", "x")
    variables = {"ROOKERY_TEST_MODE": mode}
    with forked(run_command, slow / "errors", *command, variables=variables) as process:
        wait_for(
            process, lambda: rollouts(slow / "runs/x") >= NUM_FREE and (slow / "waits").exists()
        )
        yield process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=long)]
)
def test_an_evaluation_interrupted_and_resumed(
    rookery: Command, slow: Path, number: signal.Signals, code: int
) -> None:
    with running(slow, "slow") as process:
        process.send(number)
        assert process.wait() == code and process.lines.read() == ""
    err = (slow / "errors").read_text()
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last == f"error: Interrupted. Go on with: rookery runs resume {slow / 'runs/x'}"
    assert rollouts(slow / "runs/x") == NUM_FREE and not (slow / "runs/x/report.json").exists()
    with Run.view(slow / "runs/x") as run:
        assert run.status == "interrupted" and run.ending is not None, "it was closed in order"
    assert rookery(*last.partition("rookery ")[2].split()).code == 0
    judged = (slow / "judged.txt").read_text().split()
    assert sorted(judged) == sorted({f"rows/{i}" for i in range(NUM_TASKS)}), "nothing twice"
    assert rookery("eval", "tiny", "slow.yaml", "--name", "whole").code == 0
    resumed, whole = (
        json.loads((slow / f"runs/{name}/report.json").read_text()) for name in ("x", "whole")
    )
    for key in ("model", "taskset", "num_tasks", "models"):
        assert resumed[key] == whole[key]


def test_a_second_signal_kills_at_once(slow: Path) -> None:
    with running(slow, "stubborn") as process:
        process.send(signal.SIGTERM)
        wait_for(process, (slow / "cancelled").exists)
        process.send(signal.SIGTERM)  # it does not end by itself
        assert process.wait() == -signal.SIGTERM
    with Run.open(slow / "runs/x") as run:
        assert run.last("rollout") is not None


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


@pytest.mark.parametrize("is_command", [True, False], ids=["command", "script"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work_is_cancelled_and_the_handlers_come_back(
    number: signal.Signals, is_command: bool
) -> None:
    has_cleaned = False

    async def work() -> None:
        nonlocal has_cleaned
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            has_cleaned = True

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with stop_signals() if is_command else nullcontext():
            with pytest.raises(Stopped, match=number.name) as stopped:
                run_stoppable(work())
            assert has_cleaned and stopped.value.code == 128 + number
        after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert after == before


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]],
    ids=["ctrl-c", "sigterm", "ctrl-c twice"],
)
def test_a_notebook_waits_for_the_end_of_cancelled_work(numbers: list[signal.Signals]) -> None:
    first, *later = numbers
    has_closed = False

    async def work() -> None:
        nonlocal has_closed
        try:
            os.kill(os.getpid(), first)
            await asyncio.sleep(60)
        finally:
            for number in later:
                os.kill(os.getpid(), number)
            await asyncio.sleep(0.2)  # time for a caller that does not wait to return
            has_closed = True

    async def cell() -> None:
        with pytest.raises(Stopped, match=first.name):
            run_async(work())
        assert has_closed
        assert not [thread for thread in threading.enumerate() if thread.name == "rookery-run"]

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    loop = asyncio.new_event_loop()  # as in a notebook, whose loop handles no signals
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


COMPUTING = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from rookery.compose.running import run_async

async def work():
    print("begun", flush=True)
    await asyncio.get_running_loop().run_in_executor(EXECUTOR, time.sleep, 100)

run_async(work(), stop_s=LIMIT)
"""
"""Its thread goes on when the work is cancelled; one of the event loop's own keeps that open."""


@pytest.mark.parametrize(
    ("executor", "limit"),
    [("ThreadPoolExecutor(1)", 60), ("None", 0.5)],
    ids=["after the loop", "within the loop"],
)
def test_a_command_with_a_limit_does_not_wait_for_its_threads(executor: str, limit: float) -> None:
    code = COMPUTING.replace("EXECUTOR", executor).replace("LIMIT", str(limit))
    with forked(run_code, code) as process:
        assert process.lines.readline() == "begun\n"
        began = time.monotonic()
        process.send(signal.SIGTERM)
        assert process.wait() == 143 and time.monotonic() - began < 30


def test_sigterm_outside_a_loop_raises() -> None:
    with stop_signals(), pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert stopped.value.code == 143


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return "done"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals():
            assert run_stoppable(work()) == "done"
    finally:
        signal.signal(signal.SIGINT, before)
