"""A SQLite file of a run: how it is opened and checked, and its errors as sentences.

    with sqlite_boundary(path):
        writer = open_writer(path, FORMAT, create=True)
        with transaction(writer):
            writer.execute(...)

Files are in WAL mode with `synchronous=FULL`: a transaction that was committed survives `kill -9`
and a power cut, and what a crash cut short is dropped at the next opening.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import RunError

__all__ = ["FileFormat", "connect", "damage", "open_writer", "sqlite_boundary", "transaction"]

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
    """What a file is, as marked in it."""

    what: str
    """"an event log", for messages."""
    application_id: int
    """Marks the file as ours: another program's database is refused, not written to."""
    version: int
    schema: str
    """SQL that makes the tables of an empty file."""
    can_shrink: bool = False
    """Whether `PRAGMA incremental_vacuum` gives the space of deleted rows back to the disk."""

    def check(self, connection: sqlite3.Connection, path: Path) -> None:
        """Raise a RunError unless the file is of this format, or of an older version of it."""
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
        """The schema and the marks, all or nothing."""
        return (
            f"BEGIN;\n{self.schema}\nPRAGMA application_id = {self.application_id};\n"
            f"PRAGMA user_version = {self.version};\nCOMMIT;"
        )


def connect(path: Path, *, mode: str) -> sqlite3.Connection:
    """A connection in autocommit, for any thread; `mode` is "ro", "rw", "rwc", "ro&immutable=1"."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


def open_writer(path: Path, form: FileFormat, *, create: bool = False) -> sqlite3.Connection:
    """Open for writing: drop what a crash left half-written, and check the file as a whole.

    The check reads the file once, about a second per gigabyte.
    """
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
    """All of the block, durable at its end, or nothing; "BEGIN" for one that only reads."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # whatever it is: all of it or nothing
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def sqlite_boundary(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into a RunError that says what to do about it."""
    try:
        yield
    except sqlite3.Error as cause:
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # unset when Python itself objects
        is_damaged = code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
        remedy = DAMAGED if is_damaged else REMEDIES.get(code, "it cannot be used")
        raise RunError(f"{path}: {remedy} ({cause}).") from cause


def damage(path: Path, detail: str) -> RunError:
    """The error of a file that is damaged."""
    return RunError(f"{path}: {DAMAGED} ({detail}).")
