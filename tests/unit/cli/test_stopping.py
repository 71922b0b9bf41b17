"""SIGTERM ends a command as Ctrl-C does: in order; a second signal kills at once."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driving import Command, write_rows
from forked import Forked, forked, run_code, run_command

from rookery.compose.running import run_async
from rookery.runs import Run
from rookery.runtime.stopping import Stopped, run_stoppable, stop_signals

SCORER = """
import asyncio, os
from pathlib import Path

mode, judged = os.environ.get("ROOKERY_TEST_MODE"), 0

async def reward(task, completion):
    global judged
    judged += 1
    if mode and judged > 60:
        Path("waiting").touch()
        try:
            await asyncio.sleep(3600)
        finally:
            Path("cancelled").touch()
            if mode == "stubborn":
                await asyncio.sleep(3600)
    return len(completion.tokens) / 4
"""

CONFIG = """\
engine: {model: tiny}
init: {type: file, path: founders, use: adapters}
tasksets:
- type: jsonl
  path: rows.jsonl
  scorer: {type: python, function: 'scorer.py:reward'}
  sampling: {max_tokens: 4, temperature: 1.0}
stages: [{type: ga, generations: 3, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2, random_search: false}
"""


@pytest.fixture
def config(place: Path) -> Path:
    rows = [{"id": str(i), "prompt": f"w{4 + i % 90} w{4 + i % 7}", "reference": ""}
            for i in range(40)]  # fmt: skip
    write_rows(place / "rows.jsonl", rows)
    (place / "g.yaml").write_text(CONFIG)
    (place / "scorer.py").write_text(SCORER)
    return place


@contextmanager
def running(config: Path, mode: str) -> Iterator[Forked]:
    command = ("genome", "run", "g.yaml", "--name", "x")
    variables = {"ROOKERY_TEST_MODE": mode}
    with forked(run_command, config / "errors", *command, variables=variables) as process:
        wait_for(process, (config / "waiting").exists)
        assert has_rollouts(config / "runs/x")
        yield process


def has_rollouts(path: Path) -> bool:
    with Run.view(path) as run:
        return run.last("rollout") is not None


def wait_for(process: Forked, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert not process.has_ended, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_evolution_told_to_terminate_is_resumed(rookery: Command, config: Path) -> None:
    with running(config, "slow") as process:
        process.send(signal.SIGTERM)
        assert process.wait() == 143
    err = (config / "errors").read_text()
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last == f"error: Interrupted. Go on with: rookery runs resume {config / 'runs/x'}"
    with Run.view(config / "runs/x") as run:
        assert run.status == "interrupted" and run.ending is not None, "it was closed in order"
    assert rookery("runs", "resume", config / "runs/x").code == 0
    assert rookery("genome", "run", "g.yaml", "--name", "whole").code == 0
    resumed, whole = (
        json.loads((config / f"runs/{name}/report.json").read_text()) for name in ("x", "whole")
    )
    for key in ("winner_id", "lineage", "num_rollouts", "num_tokens"):
        assert resumed[key] == whole[key]


def test_a_second_signal_kills_at_once(config: Path) -> None:
    with running(config, "stubborn") as process:
        process.send(signal.SIGTERM)
        wait_for(process, (config / "cancelled").exists)
        process.send(signal.SIGTERM)  # it does not end by itself
        assert process.wait() == -signal.SIGTERM
    with Run.open(config / "runs/x") as run:
        assert run.last("rollout") is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work_is_cancelled_and_the_handlers_come_back(number: signal.Signals) -> None:
    has_cleaned = False

    async def work() -> None:
        nonlocal has_cleaned
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            has_cleaned = True

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_signals():
        with pytest.raises(Stopped, match=number.name) as stopped:
            run_stoppable(work())
        assert has_cleaned and stopped.value.code == 128 + number
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_goes_on_has_its_own_handlers_again(number: signal.Signals) -> None:
    async def work() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Stopped):
            run_stoppable(work())
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
