"""The event log of a run: what happened, in order, on disk before the caller hears of it.

    log = EventLog.open(run / "events.db")
    log.append("evaluation", {"candidate": "c7", "score": 0.5}, key="3/c7")
    [event.payload["score"] for event in log.events("evaluation")]

One SQLite file in WAL mode with `synchronous=FULL`: an append that returned survives `kill -9` and
a power cut, an append that raised did not happen. Readers need no lock and see whole transactions.
Every call is synchronous and may come from any thread, the one of an asyncio loop included: an
append waits once for the disk, a fraction of a millisecond on an idle local one.
"""

import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rookery.errors import RunError
from rookery.runs.document import canonical, decode, encode, is_utf8

__all__ = ["Event", "EventLog", "EventView", "NewEvent"]

APPLICATION_ID = 0x524F4F4B
"""Marks the file as ours ("ROOK"): another program's database is refused, not written to."""
SCHEMA_VERSION = 1
PAGE_ROWS = 256
"""Events are read in pages, as one long read would keep the write-ahead log from shrinking."""
BUSY_TIMEOUT_S = 10.0
KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(/[A-Za-z0-9_-]+)*")

SCHEMA = f"""
BEGIN;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    payload TEXT NOT NULL,
    time_s REAL NOT NULL
);
CREATE INDEX events_of_kind ON events (kind, seq);
CREATE UNIQUE INDEX event_keys ON events (kind, key) WHERE key <> '';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
COLUMNS = "seq, kind, key, payload, time_s"
REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then resume. Nothing stored is lost",
    sqlite3.SQLITE_IOERR: "the disk is full or reports an error: check it, then resume",
    sqlite3.SQLITE_BUSY: "another program holds the file: close it and try again",
    sqlite3.SQLITE_LOCKED: "another program holds the file: close it and try again",
    sqlite3.SQLITE_READONLY: "it may not be written: change its permissions or copy the run",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check the permissions, or copy the run to a "
    "folder you may write to",
    sqlite3.SQLITE_TOOBIG: "the payload is too large: store it with blobs.put_bytes and write its "
    "digest",
}
DAMAGED = (
    "it is damaged. Restore the run directory from a copy, or start a new run; `rookery runs "
    "export` writes the events before the damage, where they can be read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One durable line of a run: `Event(seq=7, kind="evaluation", key="3/c7", ...)`."""

    seq: int
    """1 for the first event of the run, 2 for the second, with no gaps."""
    kind: str
    key: str
    """Names the event within its kind, so that it can be appended only once; "" for no name."""
    payload: Mapping[str, Any]
    """A JSON object, opaque here: only who appended the kind knows its shape."""
    time_s: float
    """Unix time of the append. Clocks step back: `seq` is the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to be appended: `NewEvent(kind="label", key="task/3", payload={"label": True})`."""

    kind: str
    payload: Mapping[str, object]
    key: str = ""


class EventView:
    """Read access to the event log, while another process may be writing it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._mutex = threading.RLock()
        self._is_closed = False

    @classmethod
    def view(cls, path: Path) -> "EventView":
        """Open for reading. A run on a read-only disk can be viewed if it was closed cleanly."""
        with _sqlite_boundary(path):
            view = cls(path, _connect(f"{path.absolute().as_uri()}?mode=ro"))
            try:
                view._check_schema()
            except sqlite3.OperationalError as error:
                view.close()
                wal = path.with_name(path.name + "-wal")
                if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or wal.exists():
                    raise
                # No log beside it, so no writer, but SQLite wants to make one: read as it is.
                view = cls(path, _connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1"))
                view._check_schema()
            return view

    def events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Events in order of `seq`, those of one kind or all, beginning behind seq `after`.

        A damaged log gives the events before the damage, then a RunError.
        """
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
            yield from map(self._event, rows)
            after = rows[-1][0]

    def last(self, kind: str | None = None) -> Event | None:
        """The newest event, of one kind or of all."""
        condition, values = ("", []) if kind is None else ("WHERE kind = ?", [kind])
        query = f"SELECT {COLUMNS} FROM events {condition} ORDER BY seq DESC LIMIT 1"
        rows = self._fetch(query, *values)
        return self._event(rows[0]) if rows else None

    def get(self, kind: str, key: str) -> Event | None:
        """The event that was appended under a key."""
        query = f"SELECT {COLUMNS} FROM events WHERE kind = ? AND key = ? AND key <> ''"
        rows = self._fetch(query, kind, key)
        return self._event(rows[0]) if rows else None

    def time_s(self, seq: int) -> float:
        """When the event of this number was appended."""
        rows = self._fetch("SELECT time_s FROM events WHERE seq = ?", seq)
        if not rows:
            raise RunError(f"{self._path} has no event {seq}.")
        return float(rows[0][0])

    def counts(self) -> dict[str, int]:
        """How many events there are of each kind."""
        return dict(self._fetch("SELECT kind, count(*) FROM events GROUP BY kind ORDER BY kind"))

    def close(self) -> None:
        """Fold the write-ahead log into the file if this is the writer. A second call is free."""
        with self._mutex:
            self._is_closed = True
            self._connection.close()

    def _fetch(self, query: str, *values: object) -> list[Any]:
        with self._mutex, _sqlite_boundary(self._path):
            self._require_open()
            return self._connection.execute(query, values).fetchall()

    def _event(self, row: tuple[int, str, str, str, float]) -> Event:
        seq, kind, key, text, time_s = row
        payload = decode(text, what=f"Event {seq} of {self._path}")
        return Event(seq=seq, kind=kind, key=key, payload=payload, time_s=time_s)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RunError(f"{self._path} was closed: open the run again.")

    def _check_schema(self) -> None:
        application = self._connection.execute("PRAGMA application_id").fetchone()[0]
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        tables = self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if application == 0 and tables == 0:
            raise RunError(
                f"{self._path} is empty: the run was stopped before it began, or the file was "
                "emptied. Create the run again under its name, or under another one."
            )
        if application != APPLICATION_ID:
            raise RunError(f"{self._path} is not an event log: it belongs to another program.")
        if version > SCHEMA_VERSION:
            raise RunError(
                f"{self._path} has format {version}, this version of Rookery reads up to "
                f"{SCHEMA_VERSION}: upgrade Rookery."
            )


class EventLog(EventView):
    """The event log of the process that owns the run: the only writer."""

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open for writing: drop what a crash left half-written, and check the file as a whole.

        The check reads the file once, about a second per gigabyte.
        """
        with _sqlite_boundary(path):
            log = cls(
                path, _connect(f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}")
            )
            try:
                log._prepare(create=create)
            except BaseException:  # Ctrl-C too: nobody else could close it
                log._connection.close()
                raise
        return log

    def append(self, kind: str, payload: Mapping[str, object], *, key: str = "") -> Event:
        """Store one event; it is durable when this returns.

        The same kind and key again returns the first event and stores nothing; with another
        payload it is a RunError, as one of the two would be lost.
        """
        return self.append_many([NewEvent(kind=kind, payload=payload, key=key)])[0]

    def append_many(self, news: Sequence[NewEvent]) -> list[Event]:
        """Store all of them, or none, with one wait for the disk; returned in the order given."""
        texts = [_check_new(new) for new in news]
        with self._mutex, _sqlite_boundary(self._path):
            self._require_open()
            with self._transaction():
                pairs = zip(news, texts, strict=True)
                return [self._insert(new, text) for new, text in pairs]

    def _insert(self, new: NewEvent, text: str) -> Event:
        first = self.get(new.kind, new.key) if new.key else None
        if first is not None:
            stored = encode(first.payload, what=f"Event {first.seq}")
            if canonical(stored) != canonical(text):
                raise RunError(
                    f"The event {new.kind!r} with key {new.key!r} exists (seq {first.seq}) with "
                    f"another payload: stored {_clip(stored)}, given {_clip(text)}. A key names "
                    "one event for ever: use another key."
                )
            return first
        now_s = time.time()
        cursor = self._connection.execute(
            "INSERT INTO events (kind, key, payload, time_s) VALUES (?, ?, ?, ?)",
            (new.kind, new.key, text, now_s),
        )
        return self._event((cursor.lastrowid or 0, new.kind, new.key, text, now_s))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:  # Ctrl-C too: all of it or nothing
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _prepare(self, *, create: bool) -> None:
        run = self._connection.execute
        if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise RunError(f"{self._path}: its file system has no shared memory: use a local disk.")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA fullfsync = ON")
        if create and run("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
            self._connection.executescript(SCHEMA)
        self._check_schema()
        problem = run("PRAGMA quick_check(1)").fetchone()[0]
        count, last = run("SELECT count(*), coalesce(max(seq), 0) FROM events").fetchone()
        if problem != "ok" or count != last:
            problem = " ".join(problem.split())
            detail = problem if problem != "ok" else f"{last - count} of {last} events are missing"
            raise RunError(f"{self._path}: {DAMAGED} ({detail}).")


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


@contextmanager
def _sqlite_boundary(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as cause:
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # unset when Python itself objects
        is_damaged = code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
        remedy = DAMAGED if is_damaged else REMEDIES.get(code, "it cannot be used")
        raise RunError(f"{path}: {remedy} ({cause}).") from cause


def _check_new(new: NewEvent) -> str:
    """The payload as text, or a RunError that names what is wrong with the event."""
    if not KIND.fullmatch(new.kind):
        raise RunError(
            f"Got the event kind {new.kind!r}: a kind is a noun such as 'evaluation' or "
            "'island/migration', in letters, digits, '_', '-' and '/'."
        )
    if not is_utf8(new.key):
        raise RunError(f"Got the key {new.key!r} of a {new.kind!r}: a key is text that has UTF-8.")
    return encode(dict(new.payload), what=f"The payload of a {new.kind!r} event")


def _clip(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
