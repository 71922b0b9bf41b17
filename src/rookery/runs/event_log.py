"""The event log of the process that owns a run: ordered appends, durable when they return.

    log = EventLog.open(run / "events.db")
    future = log.submit([NewEvent(kind="evaluation", payload={"score": 0.5}, key="3/c7")])
    log.append("evaluation", {"candidate": "c7", "score": 0.5}, key="3/c7")     # in a thread
    log.close()

One thread encodes payloads and writes in groups (`GroupCommit`), so that the event loop does
neither. An append that returned survives `kill -9` and a power cut; one that raised did not happen.
Reads use their own connection and never wait for a write.
"""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rookery.errors import RunError, boundary
from rookery.runs.disk import canonical, decode, encode, is_utf8
from rookery.runs.journal import (
    FileFormat,
    GroupCommit,
    connect,
    damage,
    open_writer,
    sqlite_boundary,
    transaction,
)

__all__ = [
    "COLUMNS",
    "EVENTS_FORMAT",
    "FORMER",
    "Event",
    "EventLog",
    "EventView",
    "NewEvent",
    "read_event",
]

# Read access to the events of a run, in order.
#
#     view = EventView.view(run / "events.db")
#     [event.payload["score"] for event in view.events("evaluation")]
#
# Readers need no lock and see whole transactions while another process or thread writes. Events are
# read in pages: memory does not grow with their number.


EVENTS_FORMAT = FileFormat(
    what="an event log",
    application_id=0x524F4F4B,  # "ROOK"
    version=1,
    schema="""
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    payload TEXT NOT NULL,
    time_s REAL NOT NULL
);
CREATE INDEX events_of_kind ON events (kind, seq);
CREATE UNIQUE INDEX event_keys ON events (kind, key) WHERE key <> '';
""",
)
PAGE_ROWS = 256
"""Rows per page of events: one long read would keep the write-ahead log from shrinking."""
FIELD_ROWS = 4096
KEYS = 512
"""Keys per query: SQLite before 3.32 takes at most 999 values."""
COLUMNS = "seq, kind, key, payload, time_s"
CLIP = 400
"""Characters of a payload in a list of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One durable line of a run: `Event(seq=7, kind="evaluation", key="3/c7", ...)`."""

    seq: int
    """1 for the first event of the run, 2 for the second, without gaps."""
    kind: str
    key: str
    """Name within the kind, under which an event is appended only once; "" for no name."""
    payload: Mapping[str, Any]
    """A JSON object, opaque here: only the writer of this kind knows its shape."""
    time_s: float
    """Unix time of the append. Clocks step back: `seq` is the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to append: `NewEvent(kind="label", key="task/3", payload={"label": True})`."""

    kind: str
    payload: Mapping[str, object]
    """Must not change after submission: another thread encodes it."""
    key: str = ""
    first_wins: bool = False
    """If the key exists with another payload, return the stored event instead of raising."""


class EventView:
    """Read access to the event log, while another process may write it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self.connection = connection
        self._mutex = threading.Lock()
        self._is_closed = False

    @classmethod
    def view(cls, path: Path) -> "EventView":
        """Open for reading. On a read-only disk this needs a run that was closed cleanly."""
        with sqlite_boundary(path):
            view = cls(path, connect(path, mode="ro"))
            try:
                EVENTS_FORMAT.check(view.connection, path)
            except sqlite3.OperationalError as error:
                view.close()
                wal = path.with_name(path.name + "-wal")
                if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or wal.exists():
                    raise
                # No write-ahead log, so no writer, but SQLite wants to make one: read as it is.
                view = cls(path, connect(path, mode="ro&immutable=1"))
                EVENTS_FORMAT.check(view.connection, path)
            return view

    def events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Yield events of one kind, or all, with `seq` above `after`, in order. A damaged log
        yields the events before the damage, then raises RunError."""
        condition, values = ("", []) if kind is None else ("AND kind = ?", [kind])
        query = f"SELECT {COLUMNS} FROM events WHERE seq > ? {condition} ORDER BY seq LIMIT ?"
        num_rows = PAGE_ROWS
        while True:
            try:
                rows = self._fetch(query, after, *values, num_rows)
            except RunError:
                if num_rows == 1:
                    raise
                num_rows = 1  # one by one up to the damage
                continue
            if not rows:
                return
            yield from (read_event(row, self._path) for row in rows)
            after = rows[-1][0]

    def last(self, kind: str | None = None) -> Event | None:
        """Return the newest event, of one kind or of all."""
        condition, values = ("", []) if kind is None else ("WHERE kind = ?", [kind])
        query = f"SELECT {COLUMNS} FROM events {condition} ORDER BY seq DESC LIMIT 1"
        rows = self._fetch(query, *values)
        return read_event(rows[0], self._path) if rows else None

    def get(self, kind: str, key: str) -> Event | None:
        """Return the event appended under a key."""
        query = f"SELECT {COLUMNS} FROM events WHERE kind = ? AND key = ? AND key <> ''"
        rows = self._fetch(query, kind, key)
        return read_event(rows[0], self._path) if rows else None

    def find(self, kind: str, keys: Sequence[str]) -> dict[str, Event]:
        """Return the events appended under any of these keys, by key. Cheaper than `get` each."""
        found: dict[str, Event] = {}
        for first in range(0, len(keys), KEYS):
            page = keys[first : first + KEYS]
            test = f"kind = ? AND key IN ({', '.join('?' * len(page))}) AND key <> ''"
            query = f"SELECT {COLUMNS} FROM events WHERE {test}"
            events = (read_event(row, self._path) for row in self._fetch(query, kind, *page))
            found |= {event.key: event for event in events}
        return found

    def fields(self, kind: str, names: Sequence[str], *, after: int = 0) -> Iterator[list[Any]]:
        """Yield each event's seq and these payload fields, in order, without decoding the rest."""
        columns = ", ".join("json_extract(payload, ?)" for _ in names)
        query = (
            f"SELECT seq, {columns} FROM events WHERE kind = ? AND seq > ? ORDER BY seq LIMIT "
            f"{FIELD_ROWS}"
        )
        paths = [f"$.{name}" for name in names]
        while rows := self._fetch(query, *paths, kind, after):
            yield from rows
            after = rows[-1][0]

    def keyed(self, kind: str, prefix: str) -> list[Event]:
        """Return the events of a kind whose key has this prefix, in order; only these are read."""
        query = f"SELECT {COLUMNS} FROM events WHERE kind = ? AND key > ? AND key < ? AND key <> ''"
        rows = self._fetch(query, kind, prefix, f"{prefix}\U0010ffff")
        return [read_event(row, self._path) for row in sorted(rows)]

    def page(
        self, kind: str = "", *, text: str = "", offset: int = 0, limit: int = 100
    ) -> tuple[int, list[tuple[int, str, str, str, float]]]:
        """Return the number of events that match, and a page of them as rows of COLUMNS. `kind` ""
        matches all. Payloads are cut to CLIP characters and not decoded."""
        tests, values = [], []
        if kind:
            tests, values = ["kind = ?"], [kind]
        if text:
            tests.append("(instr(key, ?) OR instr(payload, ?))")
            values += [text, text]
        where = f"WHERE {' AND '.join(tests)}" if tests else ""
        columns = COLUMNS.replace("payload", f"substr(payload, 1, {CLIP})")
        [(total,)] = self._fetch(f"SELECT count(*) FROM events {where}", *values)
        query = f"SELECT {columns} FROM events {where} ORDER BY seq LIMIT ? OFFSET ?"
        return total, self._fetch(query, *values, limit, offset)

    def time_s(self, seq: int) -> float:
        """Return the Unix time of this event's append."""
        rows = self._fetch("SELECT time_s FROM events WHERE seq = ?", seq)
        if not rows:
            raise RunError(f"{self._path} has no event {seq}.")
        return float(rows[0][0])

    def counts(self) -> dict[str, int]:
        """Return the number of events of each kind."""
        return dict(self._fetch("SELECT kind, count(*) FROM events GROUP BY kind ORDER BY kind"))

    def close(self) -> None:
        """Close the log. Idempotent."""
        with self._mutex:
            self._is_closed = True
            self.connection.close()

    def _fetch(self, query: str, *values: object) -> list[Any]:
        with self._mutex, sqlite_boundary(self._path):
            if self._is_closed:
                raise RunError(f"{self._path} was closed: open the run again.")
            return self.connection.execute(query, values).fetchall()


def read_event(row: tuple[int, str, str, str, float], path: Path) -> Event:
    """Return the event in a row of COLUMNS."""
    seq, kind, key, text, time_s = row
    payload = decode(text, what=f"Event {seq} of {path}")
    return Event(seq=seq, kind=kind, key=key, payload=payload, time_s=time_s)


FORMER = "former/"
"""Prefix of the kind of an event that no longer counts."""

KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(/[A-Za-z0-9_-]+)*")
PAYLOAD_CHARACTERS = 200_000_000
"""SQLite holds a gigabyte, and a character takes up to 4 bytes."""


class EventLog(EventView):
    """The only writer of the log. Made by `open`."""

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        super().__init__(path, reader)
        self._writer = writer
        self._group: GroupCommit[Sequence[NewEvent], list[Event]] = GroupCommit(
            self._commit, name=str(path)
        )

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open for writing: drop half-written data of a crash, and check the whole file. The check
        reads the file once, about a second per gigabyte."""
        with sqlite_boundary(path):
            writer = open_writer(path, EVENTS_FORMAT, create=create)
            try:
                _check_no_gaps(writer, path)
                return cls(path, connect(path, mode="ro"), writer)
            except BaseException:  # Ctrl-C too: nobody else could close it
                writer.close()
                raise

    def submit(self, news: Sequence[NewEvent]) -> "Future[list[Event]]":
        """Queue events to be stored, all or none; the future completes when they are durable.

        If the same kind and key exist, the stored event is returned and nothing is stored. If its
        payload differs, that is a RunError, unless the event sets `first_wins`.
        """
        return self._group.submit(list(news))

    def append(self, kind: str, payload: Mapping[str, object], *, key: str = "") -> Event:
        """Store one event and wait for the disk: not in an event loop."""
        return self.append_many([NewEvent(kind=kind, payload=payload, key=key)])[0]

    def append_many(self, news: Sequence[NewEvent]) -> list[Event]:
        """Store all events or none, waiting once for the disk; return them in their order."""
        return self.submit(news).result()

    def set_aside(
        self, kinds: Collection[str], *, keep: Callable[[Event], bool], key: Callable[[Event], str]
    ) -> None:
        """Rename events of these kinds, except those to keep, to the kind former/KIND with another
        key, all or none. A key then finds the newest event set aside under it."""
        moves = [
            (f"{FORMER}{kind}", key(event), event.seq)
            for kind in kinds
            for event in self.events(kind)
            if not keep(event)
        ]
        with sqlite_boundary(self._path), transaction(self._writer):
            for move in moves:
                older = "UPDATE events SET key = '' WHERE kind = ? AND key = ? AND key <> ''"
                self._writer.execute(older, move[:2])
                self._writer.execute("UPDATE events SET kind = ?, key = ? WHERE seq = ?", move)

    def close(self) -> None:
        """Store queued events and fold the write-ahead log into the file. Idempotent."""
        self._group.close()
        super().close()
        with sqlite_boundary(self._path):
            self._writer.close()

    def _commit(self, batches: Sequence[Sequence[NewEvent]]) -> list[list[Event] | RunError]:
        with sqlite_boundary(self._path), transaction(self._writer):
            return [self._store(batch) for batch in batches]

    def _store(self, news: Sequence[NewEvent]) -> list[Event] | RunError:
        """Return the stored events; RunError if one is invalid, and then none is stored."""
        if len(news) == 1:  # refused before its insert: nothing to roll back
            try:
                return [self._insert(news[0], _check_new(news[0]))]
            except RunError as refusal:
                return refusal
        self._writer.execute("SAVEPOINT batch")
        try:
            stored: list[Event] | RunError = [self._insert(new, _check_new(new)) for new in news]
        except RunError as refusal:
            self._writer.execute("ROLLBACK TO batch")
            stored = refusal
        self._writer.execute("RELEASE batch")
        return stored

    def _insert(self, new: NewEvent, text: str) -> Event:
        first = self._find(new) if new.key else None
        if first is not None:
            stored = encode(first.payload, what=f"Event {first.seq}")
            if not new.first_wins and canonical(stored) != canonical(text):
                raise RunError(
                    f"The event {new.kind!r} with key {new.key!r} exists (seq {first.seq}) with "
                    f"another payload: stored {_clip(stored)}, given {_clip(text)}. A key names "
                    "one event: use another key."
                )
            return first
        now_s = time.time()
        cursor = self._writer.execute(
            "INSERT INTO events (kind, key, payload, time_s) VALUES (?, ?, ?, ?)",
            (new.kind, new.key, text, now_s),
        )
        return read_event((cursor.lastrowid or 0, new.kind, new.key, text, now_s), self._path)

    def _find(self, new: NewEvent) -> Event | None:
        """Return the event of this key, even from the transaction in progress."""
        query = f"SELECT {COLUMNS} FROM events WHERE kind = ? AND key = ? AND key <> ''"
        row = self._writer.execute(query, (new.kind, new.key)).fetchone()
        return None if row is None else read_event(row, self._path)


def _check_no_gaps(writer: sqlite3.Connection, path: Path) -> None:
    query = "SELECT count(*), coalesce(max(seq), 0) FROM events"
    count, last = writer.execute(query).fetchone()
    if count != last:
        raise damage(path, f"{last - count} of {last} events are missing")


def _check_new(new: NewEvent) -> str:
    """Return the payload as text, or raise a RunError about the event. Any other exception would
    end the writing thread, and with it the run."""
    if not isinstance(new.kind, str) or not KIND.fullmatch(new.kind):
        raise RunError(
            f"Got the event kind {new.kind!r}: a kind is a noun such as 'evaluation' or "
            "'island/migration', in letters, digits, '_', '-' and '/'."
        )
    if not isinstance(new.key, str) or not is_utf8(new.key):
        raise RunError(f"Got the key {new.key!r} of a {new.kind!r}: a key is text that has UTF-8.")
    what = f"The payload of a {new.kind!r} event"
    if not isinstance(new.payload, Mapping):
        raise RunError(f"{what} is {type(new.payload).__name__}: a payload is a dict.")
    with boundary(RunError, what):  # another thread may change the dict
        text = encode(dict(new.payload), what=what)
    if len(text) > PAYLOAD_CHARACTERS:
        raise RunError(
            f"{what} has {len(text):,} characters, the most is {PAYLOAD_CHARACTERS:,}: store it "
            "with blobs.put_bytes and write its digest."
        )
    return text


def _clip(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
