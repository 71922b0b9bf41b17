"""The events of a run, to read: what happened, in order.

    view = EventView.view(run / "events.db")
    [event.payload["score"] for event in view.events("evaluation")]

Readers need no lock and see whole transactions, while another process or thread writes. Events are
read in pages: memory does not grow with their number.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.errors import RunError
from rookery.runs.database import FileFormat, connect, sqlite_boundary
from rookery.runs.document import decode

__all__ = ["COLUMNS", "EVENTS_FORMAT", "Event", "EventView", "NewEvent", "read_event"]

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
"""Events are read in pages, as one long read would keep the write-ahead log from shrinking."""
COLUMNS = "seq, kind, key, payload, time_s"


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
    """Not to be changed after it was given: it is encoded in another thread."""
    key: str = ""
    first_wins: bool = False
    """When the key exists with another payload: return the stored event. Otherwise an error."""


class EventView:
    """Read access to the event log, while another process may be writing it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._mutex = threading.Lock()
        self._is_closed = False

    @classmethod
    def view(cls, path: Path) -> "EventView":
        """Open for reading. A run on a read-only disk can be viewed if it was closed cleanly."""
        with sqlite_boundary(path):
            view = cls(path, connect(path, mode="ro"))
            try:
                EVENTS_FORMAT.check(view._connection, path)
            except sqlite3.OperationalError as error:
                view.close()
                wal = path.with_name(path.name + "-wal")
                if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or wal.exists():
                    raise
                # No log beside it, so no writer, but SQLite wants to make one: read as it is.
                view = cls(path, connect(path, mode="ro&immutable=1"))
                EVENTS_FORMAT.check(view._connection, path)
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
            yield from (read_event(row, self._path) for row in rows)
            after = rows[-1][0]

    def last(self, kind: str | None = None) -> Event | None:
        """The newest event, of one kind or of all."""
        condition, values = ("", []) if kind is None else ("WHERE kind = ?", [kind])
        query = f"SELECT {COLUMNS} FROM events {condition} ORDER BY seq DESC LIMIT 1"
        rows = self._fetch(query, *values)
        return read_event(rows[0], self._path) if rows else None

    def get(self, kind: str, key: str) -> Event | None:
        """The event that was appended under a key."""
        query = f"SELECT {COLUMNS} FROM events WHERE kind = ? AND key = ? AND key <> ''"
        rows = self._fetch(query, kind, key)
        return read_event(rows[0], self._path) if rows else None

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
        """Idempotent."""
        with self._mutex:
            self._is_closed = True
            self._connection.close()

    def _fetch(self, query: str, *values: object) -> list[Any]:
        with self._mutex, sqlite_boundary(self._path):
            if self._is_closed:
                raise RunError(f"{self._path} was closed: open the run again.")
            return self._connection.execute(query, values).fetchall()


def read_event(row: tuple[int, str, str, str, float], path: Path) -> Event:
    """The event of a row of COLUMNS."""
    seq, kind, key, text, time_s = row
    payload = decode(text, what=f"Event {seq} of {path}")
    return Event(seq=seq, kind=kind, key=key, payload=payload, time_s=time_s)
