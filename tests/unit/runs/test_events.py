"""The event log: in order, once per key, whole batches, and what damage is told as."""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.runs import EventLog, EventView, NewEvent, Run

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


@settings(max_examples=40, deadline=None)
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


def test_append_returns_what_is_read_back(log: EventLog) -> None:
    event = log.append("label", {"ids": (1, 2), "text": "ü"}, key="k")
    assert event.payload == {"ids": [1, 2], "text": "ü"}
    assert log.get("label", "k") == event == log.last() == log.last("label")
    assert list(log.events()) == [event]


def test_a_key_appends_once_and_conflicts_are_told(log: EventLog) -> None:
    first = log.append("label", {"a": 1, "b": 2}, key="k")
    assert log.append("label", {"b": 2, "a": 1}, key="k") == first
    assert log.append("other", {"b": 2}, key="k").seq == 2
    with pytest.raises(RunError, match=r"'label' with key 'k' exists \(seq 1\).*use another key"):
        log.append("label", {"a": 1, "b": 2.0}, key="k")
    assert log.counts() == {"label": 1, "other": 1}


def test_no_key_means_every_append_counts(log: EventLog) -> None:
    assert [log.append("label", {}).seq for _ in range(3)] == [1, 2, 3]
    assert log.get("label", "") is None


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


def test_events_may_come_from_a_generator(log: EventLog, tmp_path: Path) -> None:
    assert len(log.append_many(NewEvent(kind="x", payload={}) for _ in range(3))) == 3  # type: ignore[arg-type]
    with Run.create(tmp_path, kind="x", config={}, name="r") as run:
        run.append_many_blocking(NewEvent(kind="x", payload={}) for _ in range(3))  # type: ignore[arg-type]
        assert run.counts()["x"] == 3


def test_reading_pages_filters_and_continues(log: EventLog) -> None:
    log.append_many([NewEvent(kind="ab"[i % 2], payload={"i": i}) for i in range(700)])
    assert [e.payload["i"] for e in log.events()] == list(range(700))
    assert [e.payload["i"] for e in log.events("b", after=600)] == list(range(601, 700, 2))
    last = log.last("a")
    assert last is not None and last.payload["i"] == 698
    assert log.last("c") is None


def test_acknowledged_means_forced_to_disk(log: EventLog) -> None:
    """The settings that a power cut would test: write-ahead log, synced at every commit."""
    assert log._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert log._writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_readers_see_appends_of_a_live_writer(log: EventLog, tmp_path: Path) -> None:
    view = EventView.view(tmp_path / "events.db")
    log.append("label", {"a": 1})
    assert [e.payload for e in view.events()] == [{"a": 1}]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        view._connection.execute("DELETE FROM events")
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
