"""Group commit: in order, one wait for many, and nobody is left waiting."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

import rookery
from rookery.errors import RunError
from rookery.runs import EventLog, NewEvent, Run
from rookery.runs.journal import GroupCommit


class Gate:
    """A commit that waits until it is let go, and keeps what it stored, group by group."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.threads: set[str] = set()
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def commit(self, items: Sequence[int]) -> list[int | RunError]:
        self.has_begun.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread().name)
        self.groups.append(list(items))
        return [RunError("It is odd.") if item % 2 else item * 10 for item in items]


@pytest.fixture
def gate() -> Gate:
    return Gate()


def submit_behind_the_first(
    gate: Gate, group: GroupCommit[int, int], items: range
) -> list[Future[int]]:
    """Submit 0, and the others while it is being stored."""
    futures = [group.submit(0)]
    assert gate.has_begun.wait(30)
    return futures + [group.submit(item) for item in items]


def test_what_gathers_during_a_wait_is_stored_together_in_order(gate: Gate) -> None:
    group = GroupCommit(gate.commit, name="x")
    futures = submit_behind_the_first(gate, group, range(2, 202, 2))
    assert not any(future.done() for future in futures)
    gate.may_end.set()
    assert [future.result(30) for future in futures] == [10 * i for i in range(0, 202, 2)]
    assert gate.groups == [[0], list(range(2, 202, 2))] and gate.threads == {"x"}
    group.close()


def test_a_refused_item_fails_alone(gate: Gate) -> None:
    gate.may_end.set()
    group = GroupCommit(gate.commit, name="x")
    with pytest.raises(RunError, match="odd"):
        group.submit(1).result(30)
    assert group.submit(2).result(30) == 20
    group.close()


@pytest.mark.parametrize("error", [RunError("The disk is full."), ZeroDivisionError("bug")])
def test_a_failed_write_fails_all_who_wait_and_all_later_ones(gate: Gate, error: Exception) -> None:
    gate.error = error
    group = GroupCommit(gate.commit, name="x")
    futures = submit_behind_the_first(gate, group, range(1, 50))
    gate.may_end.set()
    for future in futures:
        with pytest.raises(RunError, match=r"disk is full|bug"):
            future.result(30)
    gate.error = None
    with pytest.raises(RunError, match=r"An earlier write failed.*(disk is full|bug)"):
        group.submit(2)
    group.close()
    assert gate.groups == []


def test_close_stores_what_waits_and_then_refuses(gate: Gate) -> None:
    group = GroupCommit(gate.commit, name="x")
    futures = submit_behind_the_first(gate, group, range(2, 20, 2))
    closing = threading.Thread(target=group.close)
    closing.start()
    gate.may_end.set()
    closing.join(30)
    assert [future.result(0) for future in futures] == [10 * i for i in range(0, 20, 2)]
    group.close()
    with pytest.raises(RunError, match="was closed"):
        group.submit(2)


def make(root: Path) -> Run:
    return Run.create(root, kind="evolve", name="poet", config={})


async def test_events_keep_the_order_of_the_appends(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        events = await asyncio.gather(*(run.append("tick", {"i": i}) for i in range(500)))
        assert [event.seq for event in events] == list(range(2, 502))
        assert [event.payload["i"] for event in run.events("tick")] == list(range(500))


async def test_one_conflict_among_many_fails_alone(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        await run.append("label", {"a": 1}, key="k")
        outcomes = await asyncio.gather(
            run.append("x", {}),
            run.append_many([NewEvent(kind="x", payload={}),
                             NewEvent(kind="label", payload={"a": 2}, key="k")]),
            run.append("x", {}),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(outcomes[1], RunError) and "another payload" in str(outcomes[1])
        assert run.counts()["x"] == 2, "nothing of the refused batch was stored"


async def test_who_is_cancelled_does_not_take_the_event_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    insert = EventLog._insert

    def slow(self: EventLog, new: NewEvent, text: str) -> object:
        assert may_end.wait(30)
        return insert(self, new, text)

    with make(tmp_path) as run:
        monkeypatch.setattr(EventLog, "_insert", slow)
        waiting = [asyncio.create_task(run.append("tick", {"i": i})) for i in range(5)]
        await asyncio.sleep(0)  # each has submitted
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        may_end.set()
        await run.append("last", {})
        assert [event.payload["i"] for event in run.events("tick")] == list(range(5))


async def test_a_blocking_append_is_refused_in_an_event_loop(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        with pytest.raises(RunError, match=r"in an event loop.*await run\.append"):
            run.append_blocking("tick", {})
        assert (await asyncio.to_thread(run.append_blocking, "tick", {})).seq == 2


async def test_reads_do_not_wait_for_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, insert = threading.Event(), EventLog._insert

    def slow(self: EventLog, new: NewEvent, text: str) -> object:
        assert may_end.wait(30)
        return insert(self, new, text)

    with make(tmp_path) as run:
        monkeypatch.setattr(EventLog, "_insert", slow)
        waiting = asyncio.create_task(run.append("tick", {}))
        await asyncio.sleep(0)
        assert run.counts() == {"run/created": 1}
        may_end.set()
        await waiting
        assert run.counts() == {"run/created": 1, "tick": 1}


KILLED = """
import asyncio, os, sys
from pathlib import Path
from rookery.runs import Run

async def main():
    with Run.open(Path(sys.argv[1])) as run:
        async def tick(i):
            await run.append("tick", {"i": i, "text": "x" * 300}, key=str(i))
            os.write(1, b"%d\\n" % i)
        for first in range(0, 10**9, 1000):  # until it is killed
            await asyncio.gather(*(tick(first + i) for i in range(1000)))

asyncio.run(main())
"""


def test_kill_9_among_many_leaves_a_prefix_with_all_that_was_told(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        pass
    environment = {**os.environ, "PYTHONPATH": str(Path(rookery.__file__).parents[1])}
    command = [sys.executable, "-c", KILLED, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(100)]
        process.kill()
        told += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    with Run.open(run.path) as run:
        stored = [event.payload["i"] for event in run.events("tick")]
    assert stored == list(range(len(stored))) and set(told) <= set(stored)


def test_a_forked_child_closes_without_waiting(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.append_blocking("tick", {})
        pid = os.fork()
        if pid == 0:
            run._log._group.close()  # in the child there is no thread to wait for
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        run.append_blocking("tick", {})
        assert run.counts()["tick"] == 2
