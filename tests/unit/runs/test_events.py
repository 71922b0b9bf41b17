"""The event log: in order, once per key, whole batches, and what damage is told as."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.runs import EventLog, EventView, NewEvent, Run, event_log, journal
from rookery.runs.event_log import EVENTS_FORMAT
from rookery.runs.journal import GroupCommit, open_writer

payloads = st.dictionaries(
    st.text(max_size=3),
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=3,
)
news = st.builds(
    NewEvent,
    kind=st.sampled_from(["label", "island/step"]),
    key=st.sampled_from(["", "a", "b", "ü\n\x00"]),
    payload=payloads,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog.open(tmp_path / "events.db", create=True)
    yield log
    log.close()


@given(st.lists(st.lists(news, max_size=4) | st.just("reopen"), max_size=12))
def test_log_is_the_list_of_first_appends(steps: list[list[NewEvent] | str]) -> None:
    """Against a model: a plain list, with a key stored once and a conflicting batch undone."""
    model: list[NewEvent] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.db"
        log = EventLog.open(path, create=True)
        for batch in steps:
            if isinstance(batch, str):
                log.close()
                log = EventLog.open(path)
                continue
            expected, conflicts = _apply(model, batch)
            if conflicts:
                with pytest.raises(RunError, match="another payload"):
                    log.append_many(batch)
                continue
            events = log.append_many(batch)
            assert [(e.kind, e.key) for e in events] == [(n.kind, n.key) for n in batch]
            model = expected
        stored = list(log.events())
        assert [e.seq for e in stored] == list(range(1, len(model) + 1))
        assert [_text(e.kind, e.key, e.payload) for e in stored] == [
            _text(n.kind, n.key, n.payload) for n in model
        ]
        log.close()


def _text(*values: object) -> str:
    return repr(values)


def _apply(model: list[NewEvent], batch: list[NewEvent]) -> tuple[list[NewEvent], bool]:
    result = list(model)
    for new in batch:
        first = next(
            (m for m in result if new.key and (m.kind, m.key) == (new.kind, new.key)), None
        )
        if first is None:
            result.append(new)
        elif _text(sorted(first.payload.items())) != _text(sorted(new.payload.items())):
            return model, True
    return result, False


def test_a_key_appends_once_and_conflicts_are_told(log: EventLog) -> None:
    first = log.append("label", {"a": 1, "b": 2}, key="k")
    assert log.append("label", {"b": 2, "a": 1}, key="k") == first
    assert log.append("other", {"b": 2}, key="k").seq == 2
    with pytest.raises(RunError, match=r"'label' with key 'k' exists \(seq 1\).*use another key"):
        log.append("label", {"a": 1, "b": 2.0}, key="k")
    assert log.counts() == {"label": 1, "other": 1}


def test_a_refused_batch_leaves_nothing(log: EventLog) -> None:
    log.append("label", {"a": 1}, key="k")
    batch = [NewEvent(kind="x", payload={}), NewEvent(kind="label", payload={"a": 2}, key="k")]
    with pytest.raises(RunError, match="another payload"):
        log.append_many(batch)
    with pytest.raises(RunError, match="nan"):
        log.append_many([NewEvent(kind="x", payload={}), NewEvent(kind="x", payload={"a": nan()})])
    assert log.counts() == {"label": 1}
    assert log.append("x", {}).seq == 2


def nan() -> float:
    return float("nan")


@pytest.mark.parametrize("kind", ["", "two words", "ü", "/x", "x/", "x'--"])
def test_bad_kinds_are_refused(log: EventLog, kind: str) -> None:
    with pytest.raises(RunError, match="a kind is a noun such as"):
        log.append(kind, {})


def test_many_keys_are_found_together(log: EventLog) -> None:
    log.connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)  # SQLite before 3.32
    keys = ["a", "ü\n\x00", '"', *map(str, range(1200))]
    log.append_many([NewEvent(kind="label", key=key, payload={"key": key}) for key in [*keys, ""]])
    found = log.find("label", [*keys, "", "missing"])
    assert {key: event.payload["key"] for key, event in found.items()} == {k: k for k in keys}
    assert not log.find("other", keys) and not log.find("label", [])


def test_bad_keys_are_refused(log: EventLog) -> None:
    with pytest.raises(RunError, match="UTF-8"):
        log.append("label", {}, key="\ud800")


class Broken(Mapping[str, object]):
    """A mapping whose values cannot be read."""

    def __getitem__(self, key: str) -> object:
        raise RuntimeError(f"no value of {key}")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload": None}, "is NoneType: a payload is a dict"),
        ({"payload": [1, 2]}, "is list: a payload is a dict"),
        ({"payload": Broken()}, "The payload of a 'label' event: no value of a"),
        ({"key": 3}, "Got the key 3"),
        ({"kind": 3}, "Got the event kind 3"),
    ],
)
@pytest.mark.parametrize("num_beside", [0, 1])
def test_a_malformed_event_is_refused_alone(
    log: EventLog, change: dict[str, Any], words: str, num_beside: int
) -> None:
    bad = NewEvent(**{"kind": "label", "payload": {}, **change})
    before = log.submit([NewEvent(kind="x", payload={})])
    refused = log.submit([NewEvent(kind="y", payload={})] * num_beside + [bad])
    after = log.submit([NewEvent(kind="x", payload={})])
    with pytest.raises(RunError, match=words):
        refused.result()
    assert [event.seq for event in before.result() + after.result()] == [1, 2]
    assert log.append("x", {}).seq == 3 and log.counts() == {"x": 3}


def test_reading_pages_filters_and_continues(log: EventLog) -> None:
    log.append_many([NewEvent(kind="ab"[i % 2], payload={"i": i}) for i in range(700)])
    assert [e.payload["i"] for e in log.events()] == list(range(700))
    assert [e.payload["i"] for e in log.events("b", after=600)] == list(range(601, 700, 2))
    last = log.last("a")
    assert last is not None and last.payload["i"] == 698
    assert log.last("c") is None


def test_acknowledged_means_forced_to_disk(tmp_path: Path) -> None:
    """The settings that a power cut would test: write-ahead log, synced at every commit."""
    with closing(open_writer(tmp_path / "log.db", EVENTS_FORMAT, create=True)) as writer:
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_readers_see_appends_of_a_live_writer(log: EventLog, tmp_path: Path) -> None:
    view = EventView.view(tmp_path / "events.db")
    log.append("label", {"a": 1})
    assert [e.payload for e in view.events()] == [{"a": 1}]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        view.connection.execute("DELETE FROM events")
    view.close()


def test_threads_may_append_at_once(log: EventLog) -> None:
    def work(name: str) -> None:
        for i in range(50):
            log.append("label", {"i": i}, key=f"{name}/{i}")
            log.append("label", {"i": i}, key=f"shared/{i}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.counts() == {"label": 250}
    assert [e.seq for e in log.events()] == list(range(1, 251))


def test_use_after_close_is_a_sentence(log: EventLog) -> None:
    log.close()
    log.close()
    with pytest.raises(RunError, match="was closed"):
        log.append("label", {})
    with pytest.raises(RunError, match="was closed"):
        log.last()


def test_a_newer_format_is_refused(log: EventLog, tmp_path: Path) -> None:
    log.close()
    other = sqlite3.connect(tmp_path / "events.db")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(RunError, match=r"format 99.*upgrade"):
        EventLog.open(tmp_path / "events.db")


def test_a_foreign_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (a)")
    other.close()
    for opening in (EventLog.open, EventView.view):
        with pytest.raises(RunError, match="another program"):
            opening(path)
    other = sqlite3.connect(path)
    assert other.execute("SELECT name FROM sqlite_schema").fetchall() == [("mine",)]
    other.close()


# Group commit.


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


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What is to be stored waits until the event is set."""
    may_end, transaction = threading.Event(), journal.transaction

    @contextmanager
    def slow(connection: sqlite3.Connection) -> Iterator[None]:
        assert may_end.wait(30)
        with transaction(connection):
            yield

    monkeypatch.setattr(event_log, "transaction", slow)
    return may_end


async def test_who_is_cancelled_does_not_take_the_event_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as run:
        may_end = hold_writes(monkeypatch)
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
    with make(tmp_path) as run:
        may_end = hold_writes(monkeypatch)
        waiting = asyncio.create_task(run.append("tick", {}))
        await asyncio.sleep(0)
        assert run.counts() == {"run/created": 1}
        may_end.set()
        await waiting
        assert run.counts() == {"run/created": 1, "tick": 1}


def test_a_forked_child_closes_without_waiting() -> None:
    group: GroupCommit[int, int] = GroupCommit(lambda items: list(items), name="x")
    assert group.submit(1).result() == 1
    pid = os.fork()
    if pid == 0:
        group.close()  # in the child there is no thread to wait for
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert group.submit(2).result() == 2
    group.close()
