"""The journal of a run: requests that a server has taken, until a snapshot contains them.

    journal = run.open_journal()
    seq = await journal.append(request_bytes)           # durable when this returns
    ...
    digest = await asyncio.to_thread(run.blobs.put_folder, snapshot)
    await run.append("snapshot", {"blob": digest, "journal": seq})
    await journal.cut(through=seq)                       # the file shrinks

    snapshot = run.last("snapshot")                      # after a crash: load it, then
    for entry in journal.entries(after=snapshot.payload["journal"]):
        apply(entry.data)

The event log never shrinks; the journal holds only what is newer than the last snapshot. Appends
share their waits for the disk (see `group_commit`). A kill between the snapshot's event and the cut
leaves entries that `entries(after=...)` passes over.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import RunError
from rookery.runs.database import (
    FileFormat,
    connect,
    damage,
    open_writer,
    sqlite_boundary,
    transaction,
)
from rookery.runs.group_commit import GroupCommit

__all__ = ["Entry", "Journal"]

JOURNAL_FORMAT = FileFormat(
    what="a journal",
    application_id=0x524F4F4A,  # "ROOJ"
    version=1,
    # AUTOINCREMENT: a number is not given again after its entry was cut.
    schema="CREATE TABLE entries (seq INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB NOT NULL);",
    can_shrink=True,
)
ENTRY_BYTES = 500_000_000
"""SQLite holds a gigabyte in a row."""
PAGE_BYTES = 1 << 24
"""Entries are read in pages of about this size, so that replaying needs little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry: `Entry(seq=7, data=b"...")`; `seq` counts 1, 2, 3, ... over the whole run."""

    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Cut:
    through: int


class Journal:
    """The journal of the process that owns the run."""

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self._path = path
        self._reader = reader
        self._reading = threading.Lock()
        self._writer = writer
        self._group: GroupCommit[Sequence[bytes] | _Cut, list[int]] = GroupCommit(
            self._commit, name=str(path)
        )

    @classmethod
    def open(cls, path: Path) -> "Journal":
        """Open or make the file; what a crash left half-written is dropped. Waits for the disk."""
        with sqlite_boundary(path):
            writer = open_writer(path, JOURNAL_FORMAT, create=True)
            try:
                _check_no_gaps(writer, path)
                return cls(path, connect(path, mode="ro"), writer)
            except BaseException:  # Ctrl-C too: nobody else could close it
                writer.close()
                raise

    async def append(self, data: bytes) -> int:
        """Store an entry and return its number; it is durable then, also for who was cancelled."""
        return (await self.append_many([data]))[0]

    async def append_many(self, data: Sequence[bytes]) -> list[int]:
        """Store all of them, or none."""
        for one in data:
            if len(one) > ENTRY_BYTES:
                raise RunError(
                    f"An entry of {len(one):,} bytes is too large for a journal, the most is "
                    f"{ENTRY_BYTES:,}: store it with blobs.put_bytes and journal its digest."
                )
        return await asyncio.wrap_future(self._group.submit(list(data)))

    async def cut(self, *, through: int) -> None:
        """Drop the entries up to this number, which a durable snapshot contains."""
        await asyncio.wrap_future(self._group.submit(_Cut(through)))

    def entries(self, *, after: int) -> Iterator[Entry]:
        """The entries behind number `after`, in order. A RunError when some of them were cut."""
        first, last = self._span()
        if after + 1 < first and after < last:
            raise RunError(
                f"{self._path} was cut through entry {first - 1}, and the entries behind {after} "
                "are asked for: load a newer snapshot."
            )
        while page := self._page(after):
            yield from page
            after = page[-1].seq

    @property
    def last_seq(self) -> int:
        """The number of the newest entry, be it cut or not; 0 before the first."""
        return self._span()[1]

    def close(self) -> None:
        """Store what still waits. Idempotent."""
        self._group.close()
        with sqlite_boundary(self._path):
            self._reader.close()
            self._writer.close()

    def _span(self) -> tuple[int, int]:
        """The numbers of the first entry there is, or would be, and of the last ever given."""
        query = """SELECT (SELECT min(seq) FROM entries),
            coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'entries'), 0)"""
        with self._reading, sqlite_boundary(self._path):
            first, last = self._reader.execute(query).fetchone()
        return (last + 1 if first is None else first), last

    def _page(self, after: int) -> list[Entry]:
        query = "SELECT seq, data FROM entries WHERE seq > ? ORDER BY seq"
        page: list[Entry] = []
        num_bytes = 0
        with self._reading, sqlite_boundary(self._path):
            cursor = self._reader.execute(query, (after,))
            for seq, data in cursor:
                page.append(Entry(seq=seq, data=data))
                num_bytes += len(data)
                if num_bytes >= PAGE_BYTES:
                    break
            cursor.close()  # an open read would keep the write-ahead log from shrinking
        return page

    def _commit(self, items: Sequence[Sequence[bytes] | _Cut]) -> list[list[int] | RunError]:
        with sqlite_boundary(self._path):
            with transaction(self._writer):
                outcomes: list[list[int] | RunError] = [self._apply(item) for item in items]
            if any(isinstance(item, _Cut) for item in items):
                # As a script: `execute` ends after the first page that is given back.
                self._writer.executescript("PRAGMA incremental_vacuum")
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return outcomes

    def _apply(self, item: Sequence[bytes] | _Cut) -> list[int]:
        run = self._writer.execute
        if isinstance(item, _Cut):
            run("DELETE FROM entries WHERE seq <= ?", (item.through,))
            return []
        insert = "INSERT INTO entries (data) VALUES (?)"
        return [run(insert, (data,)).lastrowid or 0 for data in item]


def _check_no_gaps(writer: sqlite3.Connection, path: Path) -> None:
    query = "SELECT count(*), coalesce(max(seq) - min(seq) + 1, 0) FROM entries"
    count, span = writer.execute(query).fetchone()
    if count != span:
        raise damage(path, f"{span - count} of {span} entries are missing")
