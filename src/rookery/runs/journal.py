"""The journal of a run: requests that a server accepted, until a snapshot contains them.

    journal = run.open_journal()
    seq = await journal.append(request_bytes)           # durable when this returns
    ...
    digest = await asyncio.to_thread(run.blobs.put_folder, snapshot)
    await run.append("snapshot", {"blob": digest, "journal": seq})
    await journal.cut(through=seq)                       # the file shrinks
    await journal.empty([seq + 2])                       # drops an entry's data, keeps its number

    snapshot = run.last("snapshot")                      # after a crash: load it, then
    for entry in journal.entries(after=snapshot.payload["journal"]):
        apply(entry.data)

The event log never shrinks; the journal holds only entries after the last snapshot. Appends share
their waits for the disk (`GroupCommit`). A kill between the snapshot's event and the cut leaves
entries that `entries(after=...)` skips. A cut works in slices, between which appends are stored.

The SQLite files of a run: how they are opened and checked, and their errors as sentences.

    with sqlite_boundary(path):
        writer = open_writer(path, FORMAT, create=True)
        with transaction(writer):
            writer.execute(...)

Files are in WAL mode with `synchronous=FULL`: a committed transaction survives `kill -9` and a
power cut, and the next opening drops an unfinished one.
"""

import asyncio
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

from rookery.errors import RunError

__all__ = [
    "Entry",
    "FileFormat",
    "GroupCommit",
    "Journal",
    "connect",
    "damage",
    "open_writer",
    "sqlite_boundary",
    "transaction",
]


BUSY_TIMEOUT_S = 10.0
REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then resume. Nothing stored is lost",
    sqlite3.SQLITE_IOERR: "the disk is full or reports an error: check it, then resume",
    sqlite3.SQLITE_BUSY: "another program holds the file: close it and try again",
    sqlite3.SQLITE_LOCKED: "another program holds the file: close it and try again",
    sqlite3.SQLITE_READONLY: "it may not be written: change its permissions or copy the run",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check the permissions, or copy the run to a "
    "folder you may write to",
}
DAMAGED = (
    "it is damaged. Restore the run directory from a copy, or start a new run; `rookery runs "
    "export` writes the events before the damage, where they can be read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Format of a SQLite file, as marked in it."""

    what: str
    """"an event log", for messages."""
    application_id: int
    """Marks the file as ours: another program's database is refused, not written to."""
    version: int
    schema: str
    """SQL that makes the tables of an empty file."""
    can_shrink: bool = False
    """Whether `PRAGMA incremental_vacuum` returns the space of deleted rows to the disk."""

    def check(self, connection: sqlite3.Connection, path: Path) -> None:
        """Raise a RunError unless the file has this format, or an older version of it."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if application == 0 and tables == 0:
            raise RunError(
                f"{path} is empty: the run was stopped before it began, or the file was "
                "emptied. Create the run again under its name, or under another one."
            )
        if application != self.application_id:
            raise RunError(f"{path} is not {self.what}: it belongs to another program.")
        if version > self.version:
            raise RunError(
                f"{path} has format {version}, this version of Rookery reads up to "
                f"{self.version}: upgrade Rookery."
            )

    @property
    def script(self) -> str:
        """SQL that sets the schema and the marks, all or nothing."""
        return (
            f"BEGIN;\n{self.schema}\nPRAGMA application_id = {self.application_id};\n"
            f"PRAGMA user_version = {self.version};\nCOMMIT;"
        )


def connect(path: Path, *, mode: str) -> sqlite3.Connection:
    """Connect in autocommit, for any thread; `mode` is "ro", "rw", "rwc", "ro&immutable=1"."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


def open_writer(path: Path, form: FileFormat, *, create: bool = False) -> sqlite3.Connection:
    """Open for writing: drop half-written data of a crash, and check the whole file. The check
    reads the file once, about a second per gigabyte."""
    connection = connect(path, mode="rwc" if create else "rw")
    try:
        _prepare(connection, path, form, create=create)
    except BaseException:  # Ctrl-C too: nobody else could close it
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, form: FileFormat, *, create: bool) -> None:
    run = connection.execute
    is_new = create and run("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if is_new and form.can_shrink:
        run("PRAGMA auto_vacuum = INCREMENTAL")  # possible only before the first page
    if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise RunError(f"{path}: its file system has no shared memory: use a local disk.")
    run("PRAGMA synchronous = FULL")
    run("PRAGMA fullfsync = ON")
    if is_new:
        connection.executescript(form.script)
    form.check(connection, path)
    problem = run("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise damage(path, " ".join(problem.split()))


@contextmanager
def transaction(
    connection: sqlite3.Connection, *, begin: str = "BEGIN IMMEDIATE"
) -> Iterator[None]:
    """Commit the block as a whole, durably, or roll it back; with "BEGIN" only read."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # any error: all or nothing
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def sqlite_boundary(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into a RunError with a remedy."""
    try:
        yield
    except sqlite3.Error as cause:
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # unset when Python itself objects
        is_damaged = code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
        remedy = DAMAGED if is_damaged else REMEDIES.get(code, "it cannot be used")
        raise RunError(f"{path}: {remedy} ({cause}).") from cause


def damage(path: Path, detail: str) -> RunError:
    """Return the error for a damaged file."""
    return RunError(f"{path}: {DAMAGED} ({detail}).")


# Group commit: concurrent writers share one wait for the disk, made in a thread.
#
#     group = GroupCommit(store_all, name="events")      # store_all([item, ...]) -> [result, ...]
#     await asyncio.wrap_future(group.submit(item))      # from an event loop
#     group.submit(item).result()                        # from a thread
#     group.close()                                      # stores queued items
#
# Items are stored in the order of `submit`. While one group waits for the disk the next one
# gathers, so one item costs one wait and 500 together also cost one. Cancelling a wait does not
# undo the submission.


Item = TypeVar("Item")
Result = TypeVar("Result")

GROUP_ITEMS = 4096
"""Most items of one commit: bounds how long the first of them waits for the last."""


class GroupCommit(Generic[Item, Result]):
    """One thread that stores items in groups.

    `commit` stores a group and returns an outcome per item: its result, or a RunError for a refused
    item, of which nothing is stored. If `commit` raises, nothing of the group is stored. All
    waiting and all later callers then get the error, since a later item may build on a lost one. So
    the stored items are always a prefix of the submitted ones.
    """

    def __init__(
        self, commit: Callable[[Sequence[Item]], Sequence[Result | RunError]], *, name: str
    ) -> None:
        self._commit = commit
        self._name = name
        # Filled by `submit`, drained by the thread. Unbounded: each submitter waits for its result.
        self._queue: queue.SimpleQueue[tuple[Item, Future[Result]] | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        """Held to submit, close or record a failure: then nothing enters the queue any more."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._is_closed = False

    def submit(self, item: Item) -> "Future[Result]":
        """Queue an item. The future completes when it is durable, or with a RunError."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled from here on
        with self._state:
            if self._is_closed:
                raise RunError(f"{self._name} was closed: open the run again.")
            if self._failure is not None:
                raise _later(self._failure)
            if self._thread is None:
                # A daemon: a process that forgets to close still ends.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put((item, future))
        return future

    def close(self) -> None:
        """Store queued items, then end the thread. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread, and must not write
        with self._state:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            group, is_last = self._gather()
            try:
                if group:
                    self._store(group)
            except BaseException as error:  # noqa: BLE001 - whatever it is, all who wait are told
                self._fail(error, group)
                return
            if is_last:
                return

    def _gather(self) -> tuple[list[tuple[Item, "Future[Result]"]], bool]:
        """Return all queued items, at least one, and whether the queue was closed behind them."""
        group: list[tuple[Item, Future[Result]]] = []
        entry = self._queue.get()
        while entry is not None:
            group.append(entry)
            if len(group) == GROUP_ITEMS or self._queue.empty():
                return group, False
            entry = self._queue.get()  # does not block: only this thread takes from the queue
        return group, True

    def _store(self, group: Sequence[tuple[Item, "Future[Result]"]]) -> None:
        outcomes = self._commit([item for item, _ in group])
        for (_, future), outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, RunError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, error: BaseException, group: Sequence[tuple[Item, "Future[Result]"]]) -> None:
        with self._state:
            self._failure = error
        waiting = [future for _, future in group if not future.done()]
        while not self._queue.empty():
            entry = self._queue.get()
            if entry is not None:
                waiting.append(entry[1])
        for future in waiting:
            # A separate error for each: an exception raised in many tasks mixes their traces.
            future.set_exception(_copy(error))


def _copy(error: BaseException) -> RunError:
    copy = RunError(str(error) if isinstance(error, RunError) else f"Storing failed: {error!r}.")
    copy.__cause__ = error
    return copy


def _later(error: BaseException) -> RunError:
    return RunError(f"An earlier write failed, and nothing is stored after it. {_copy(error)}")


JOURNAL_FORMAT = FileFormat(
    what="a journal",
    application_id=0x524F4F4A,  # "ROOJ"
    version=1,
    # AUTOINCREMENT: the number of a cut entry is never reused.
    schema="CREATE TABLE entries (seq INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB NOT NULL);",
    can_shrink=True,
)
ENTRY_BYTES = 500_000_000
"""SQLite holds a gigabyte per row."""
PAGE_BYTES = 1 << 24
"""Entries are read in pages of about this size, so that replaying needs little memory."""

SLICE_BYTES = 1 << 21
"""A cut drops entries in slices of about this size (or of one larger entry), and then returns the
space in slices. Appends wait about 20 ms for each."""
SLICE_ENTRIES = 1000
SLICE_PAGES = SLICE_BYTES // 4096
LOG_BYTES = 1 << 20
"""Size that SQLite keeps of the write-ahead log once it was copied into the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry: `Entry(seq=7, data=b"...")`; `seq` counts 1, 2, 3, ... over the whole run."""

    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Drop:
    """Drop a slice of the entries up to a number; the result is the dropped numbers."""

    through: int


@dataclass(frozen=True, slots=True)
class _Empty:
    """Empty a slice of these entries; the result is the numbers of those that had data."""

    seqs: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Shrink:
    """Return a slice of free space to the disk; the result is empty if there was none."""


_Item = Sequence[bytes] | _Drop | _Empty | _Shrink


class Journal:
    """The journal of the process that owns the run."""

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self._path = path
        self._reader = reader
        self._reading = threading.Lock()
        self._writer = writer
        self._group: GroupCommit[_Item, list[int]] = GroupCommit(self._commit, name=str(path))

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> "Journal":
        """Open or make the file; drop half-written data of a crash. Waits for the disk."""
        with sqlite_boundary(path):
            writer = open_writer(path, JOURNAL_FORMAT, create=create)
            try:
                _check_no_gaps(writer, path)
                writer.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
                return cls(path, connect(path, mode="ro"), writer)
            except BaseException:  # Ctrl-C too: nobody else could close it
                writer.close()
                raise

    async def append(self, data: bytes) -> int:
        """Store an entry and return its number once durable. Cancelling does not undo it."""
        return (await self.append_many([data]))[0]

    async def append_many(self, data: Sequence[bytes]) -> list[int]:
        """Store all entries or none."""
        return await asyncio.wrap_future(self.submit(data))

    def submit(self, data: Sequence[bytes]) -> "Future[list[int]]":
        """Queue entries, all or none, in the order of the calls. The future completes when they are
        durable; the caller must check it for a RunError."""
        for one in data:
            if not isinstance(one, bytes):
                raise RunError(f"Got an entry that is {type(one).__name__}: an entry is bytes.")
            if len(one) > ENTRY_BYTES:
                raise RunError(
                    f"An entry of {len(one):,} bytes is too large for a journal, the most is "
                    f"{ENTRY_BYTES:,}: store it with blobs.put_bytes and journal its digest."
                )
        return self._group.submit(list(data))

    async def cut(self, *, through: int) -> None:
        """Drop the entries up to this number, which a durable snapshot contains. Appends continue
        meanwhile. The next cut drops entries that a cancelled or killed one left."""
        await self._repeat(_Drop(through))
        await self._repeat(_Shrink())

    async def empty(self, seqs: Sequence[int]) -> None:
        """Drop the data of these entries, if an older entry that is needed prevents a cut. They
        then read as entries without data."""
        await self._repeat(_Empty(seqs))
        await self._repeat(_Shrink())

    async def _repeat(self, item: _Item) -> None:
        """Submit slices until there is nothing left to do."""
        while await asyncio.wrap_future(self._group.submit(item)):
            pass

    def entries(self, *, after: int) -> Iterator[Entry]:
        """Yield the entries after a number, in order. RunError if some of them were cut, even
        during the iteration, or if the journal ends before `after`."""
        while True:
            page, last = self._page(after)
            if after > last:
                raise RunError(
                    f"{self._path} ends at entry {last}, and the entries after {after} are asked "
                    "for: it is older than the snapshot. Restore the run directory from a copy."
                )
            if after == last:
                return
            if not page or page[0].seq != after + 1:
                cut = page[0].seq - 1 if page else last
                raise RunError(
                    f"{self._path} was cut through entry {cut}, and the entries after {after} "
                    "are asked for: load a newer snapshot."
                )
            yield from page
            after = page[-1].seq

    @property
    def last_seq(self) -> int:
        """Number of the newest entry, even if it was cut; 0 before the first."""
        with self._reading, sqlite_boundary(self._path):
            return _last_seq(self._reader)

    def close(self) -> None:
        """Store queued entries and close. Idempotent."""
        self._group.close()
        with sqlite_boundary(self._path):
            self._reader.close()
            self._writer.close()

    def _page(self, after: int) -> tuple[list[Entry], int]:
        """Return the next entries, and the highest number assigned so far."""
        query = "SELECT seq, data FROM entries WHERE seq > ? ORDER BY seq"
        page: list[Entry] = []
        num_bytes = 0
        # One transaction, so that both agree. Short, because it keeps the log from shrinking.
        with self._reading, sqlite_boundary(self._path), transaction(self._reader, begin="BEGIN"):
            last = _last_seq(self._reader)
            cursor = self._reader.execute(query, (after,))
            for seq, data in cursor:
                page.append(Entry(seq=seq, data=data))
                num_bytes += len(data)
                if num_bytes >= PAGE_BYTES:
                    break
            cursor.close()
        return page, last

    def _commit(self, items: Sequence[_Item]) -> list[list[int] | RunError]:
        with sqlite_boundary(self._path):
            with transaction(self._writer):
                outcomes = [self._apply(item) for item in items]
            if any(isinstance(item, _Shrink) for item in items):
                # As a script: `execute` stops after the first returned page. Passive: does not wait
                # for readers in other processes.
                self._writer.executescript(
                    f"PRAGMA incremental_vacuum({SLICE_PAGES}); PRAGMA wal_checkpoint(PASSIVE)"
                )
        return outcomes

    def _apply(self, item: _Item) -> list[int] | RunError:
        run = self._writer.execute
        if isinstance(item, _Drop):
            last = _last_seq(self._writer)
            if item.through > last:
                return RunError(
                    f"Got a cut of {self._path} through entry {item.through}: the last is {last}."
                )
            return self._drop(item.through)
        if isinstance(item, _Shrink):
            num_free: int = run("PRAGMA freelist_count").fetchone()[0]
            return [num_free] if num_free else []
        if isinstance(item, _Empty):
            return self._empty(item.seqs)
        insert = "INSERT INTO entries (data) VALUES (?)"
        return [run(insert, (data,)).lastrowid or 0 for data in item]

    def _drop(self, through: int) -> list[int]:
        query = "SELECT seq, length(data) FROM entries WHERE seq <= ? ORDER BY seq LIMIT ?"
        dropped = _slice(self._writer.execute(query, (through, SLICE_ENTRIES)).fetchall())
        if dropped:
            self._writer.execute("DELETE FROM entries WHERE seq <= ?", (dropped[-1],))
        return dropped

    def _empty(self, seqs: Sequence[int]) -> list[int]:
        query = (
            "SELECT seq, length(data) FROM entries WHERE seq IN (SELECT value FROM json_each(?)) "
            "AND length(data) > 0 ORDER BY seq LIMIT ?"
        )
        rows = self._writer.execute(query, (json.dumps(list(seqs)), SLICE_ENTRIES)).fetchall()
        emptied = _slice(rows)
        update = "UPDATE entries SET data = x'' WHERE seq = ?"
        self._writer.executemany(update, [(seq,) for seq in emptied])
        return emptied


def _slice(rows: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of the first rows within SLICE_BYTES together, at least one."""
    totals = accumulate(size_bytes for _, size_bytes in rows)
    slice_seqs = [seq for (seq, _), total in zip(rows, totals, strict=True) if total <= SLICE_BYTES]
    return slice_seqs or [seq for seq, _ in rows[:1]]


def _last_seq(connection: sqlite3.Connection) -> int:
    query = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'entries'), 0)"
    last: int = connection.execute(query).fetchone()[0]
    return last


def _check_no_gaps(writer: sqlite3.Connection, path: Path) -> None:
    query = "SELECT count(*), coalesce(max(seq) - min(seq) + 1, 0) FROM entries"
    count, span = writer.execute(query).fetchone()
    if count != span:
        raise damage(path, f"{span - count} of {span} entries are missing")
