"""A run: a directory that holds everything about one execution and from which it resumes.

    with Run.create(Path("runs"), kind="genome", name="poet", config=document) as run:
        run.append("evaluation", {"candidate": "c1", "score": 0.5}, key="0/c1")
        run.log_metrics(0, {"score/best": 0.5})
        run.finish()

    with Run.open(Path("runs/poet")) as run:           # the process was killed: go on
        done = {event.key for event in run.events("evaluation")}

    config.json     what was asked for, complete        run.lock        who owns it now
    events.db       what happened, in order (SQLite)    report.json     the result, and anything
    blobs/          adapters, checkpoints, programs     report.html     else by `write_*`
    metrics.jsonl   numbers per step                    .tmp/           half-written files

One process owns a run at a time; `Run.view` reads it meanwhile. Every call is synchronous, from any
thread, and made plainly from an asyncio loop: an append waits once for the disk, a fraction of a
millisecond on an idle local one; `append_many` waits once for all. Forked children may not write.
"""

import difflib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from rookery.errors import RunError
from rookery.runs.blobs import BlobStore, BlobView
from rookery.runs.disk import disk_boundary, new_scratch, sweep, sync_folder, sync_tree, write_file
from rookery.runs.document import decode, encode
from rookery.runs.events import Event, EventLog, EventView, NewEvent
from rookery.runs.lock import RunLock, is_locked
from rookery.runs.metrics import MetricsFile, MetricsRow, read_metrics

__all__ = ["Outcome", "Run", "RunView", "Status"]

Outcome = Literal["finished", "failed", "interrupted"]
Status = Literal["running", "finished", "failed", "interrupted"]

CONFIG, EVENTS, LOCK, METRICS = "config.json", "events.db", "run.lock", "metrics.jsonl"
BLOBS, SCRATCH = "blobs", ".tmp"
FIRST_NAMES = frozenset(
    {CONFIG, EVENTS, f"{EVENTS}-wal", f"{EVENTS}-shm", f"{EVENTS}-journal", LOCK, BLOBS, SCRATCH}
)
"""What `create` makes before the first event: a folder with more than these has been a run."""
OWN_NAMES = FIRST_NAMES | {METRICS}
CREATED, OPENED, FINISHED = "run/created", "run/opened", "run/finished"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

logger = logging.getLogger(__name__)


class RunView:
    """A run to look at. Needs no lock and changes nothing; the owner may be writing meanwhile."""

    def __init__(self, path: Path, log: EventView, blobs: BlobView) -> None:
        self.path = path
        self.blobs = blobs
        self._log = log
        created = log.get(CREATED, CREATED)
        if created is None:
            raise RunError(f"{path} was stopped before it began: create it again under its name.")
        self.created: Event = created

    @property
    def kind(self) -> str:
        """What it executes: "genome", "grpo", "icm", "evolve", "eval", ..."""
        return str(self.created.payload["kind"])

    @property
    def name(self) -> str:
        return str(self.created.payload["name"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config it was created with."""
        document = self.read_json(CONFIG)
        if not isinstance(document, dict):
            raise RunError(f"{self.path / CONFIG} is damaged: it holds no JSON object.")
        return document

    @property
    def status(self) -> Status:
        """How the last owner ended; while it did not say: running if it lives, else interrupted."""
        lock = self.path / LOCK
        had_owner = is_locked(lock)  # asked before too: it may finish and leave meanwhile
        ending = self.ending
        if ending is not None:
            outcome: Outcome = ending.payload["outcome"]
            return outcome
        return "running" if had_owner or is_locked(lock) else "interrupted"

    @property
    def ending(self) -> Event | None:
        """What `finish` stored, {"outcome", "message"}; None when it was opened again since."""
        finished, opened = self.last(FINISHED), self.last(OPENED)
        if finished is None or (opened is not None and opened.seq > finished.seq):
            return None
        return finished

    def events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Events in order of `seq`, of one kind or all, beginning behind seq `after`."""
        return self._log.events(kind, after=after)

    def last(self, kind: str | None = None) -> Event | None:
        """The newest event, of one kind or of all."""
        return self._log.last(kind)

    def get(self, kind: str, key: str) -> Event | None:
        """The event that was appended under a key."""
        return self._log.get(kind, key)

    def counts(self) -> dict[str, int]:
        """How many events there are of each kind."""
        return self._log.counts()

    @property
    def worked_s(self) -> float:
        """Seconds from each opening of the run to the last event before the next one."""
        openings = [self.created, *self.events(OPENED)]
        newest = self.last() or self.created
        ends = [self._log.time_s(opening.seq - 1) for opening in openings[1:]] + [newest.time_s]
        spans = zip(openings, ends, strict=True)
        return sum(max(0.0, end - opening.time_s) for opening, end in spans)

    def metrics(self) -> list[MetricsRow]:
        """What `log_metrics` wrote, one row per step."""
        return read_metrics(self.path / METRICS)

    def read_json(self, name: str) -> Any:
        """A document that `write_json` wrote."""
        _check_name(name, what="file name")
        path = self.path / name
        with disk_boundary(f"Reading {path}"):
            return decode(path.read_bytes(), what=str(path))

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Run(RunView):
    """A run that this process owns. Made by `create` and `open`."""

    blobs: BlobStore
    _log: EventLog

    def __init__(self, path: Path, *, log: EventLog, lock: RunLock) -> None:
        scratch = path / SCRATCH
        blobs = BlobStore(path / BLOBS, scratch=scratch, check_owner=lock.check)
        super().__init__(path, log, blobs)
        self._lock = lock
        self._scratch = scratch
        self._metrics = MetricsFile.open(path / METRICS)
        self._has_outcome = False

    @classmethod
    def create(
        cls, root: Path, *, kind: str, config: Mapping[str, object], name: str = ""
    ) -> "Run":
        """Begin the run `root/name` and own it; without a name, one is made of kind and time.

        `config` is `config.model_dump(mode="json")`. A folder in which an earlier `create` was
        killed is taken over; one that holds a run, or anything else, is refused.
        """
        document = encode(dict(config), what="The config", indent=2)
        _check_name(kind, what="kind of run")
        root = root.absolute()
        path = _claim_folder(root, name) if name else _claim_new_folder(root, kind)
        with ExitStack() as undo:
            lock = RunLock.acquire(path / LOCK)
            undo.callback(lock.release)
            sweep(path / SCRATCH)
            log = EventLog.open(path / EVENTS, create=True)
            undo.callback(log.close)
            if log.last() is not None:
                raise RunError(_exists(path))
            write_file(path / CONFIG, document.encode() + b"\n", scratch=path / SCRATCH)
            with disk_boundary(f"Making {path}"):
                (path / BLOBS).mkdir(exist_ok=True)
                sync_folder(path)
                sync_folder(root)
            log.append(CREATED, {"kind": kind, "name": path.name}, key=CREATED)
            run = cls(path, log=log, lock=lock)
            undo.pop_all()
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Own an existing run, to resume it: repairs what a crash cut short, refuses damage."""
        path = _require_run(path)
        with ExitStack() as undo:
            lock = RunLock.acquire(path / LOCK)
            undo.callback(lock.release)
            sweep(path / SCRATCH)
            log = EventLog.open(path / EVENTS)
            undo.callback(log.close)
            run = cls(path, log=log, lock=lock)
            undo.callback(run.close)
            log.append(OPENED, {"pid": os.getpid()})
            undo.pop_all()
        return run

    @staticmethod
    def view(path: Path) -> RunView:
        """Look at a run, whoever owns it."""
        path = _require_run(path)
        with ExitStack() as undo:
            log = EventView.view(path / EVENTS)
            undo.callback(log.close)
            view = RunView(path, log, BlobView(path / BLOBS))
            undo.pop_all()
        return view

    def append(self, kind: str, payload: Mapping[str, object], *, key: str = "") -> Event:
        """Store one event; durable when this returns. See `EventLog.append` for keys."""
        return self.append_many([NewEvent(kind=kind, payload=payload, key=key)])[0]

    def append_many(self, news: Sequence[NewEvent]) -> list[Event]:
        """Store all of them or none, with one wait for the disk."""
        for new in news:
            if new.kind.startswith("run/"):
                raise RunError(f"Got the kind {new.kind!r}: kinds in run/ are written by the run.")
        self._lock.check()
        return self._log.append_many(news)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append {"area/name": number} of a step to metrics.jsonl. See `runs/metrics.py`."""
        self._lock.check()
        self._metrics.log(step, metrics)

    def write_json(self, name: str, value: object) -> Path:
        """Put a JSON document into the run directory, replacing it whole: `report.json`."""
        return self.write_text(name, encode(value, what=name, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Put a text file into the run directory, replacing it whole: `report.html`."""
        self._lock.check()
        _check_name(name, what="file name")
        if name in OWN_NAMES:
            raise RunError(f"Got the file name {name!r}: the run writes that file itself.")
        write_file(self.path / name, text.encode(errors="backslashreplace"), scratch=self._scratch)
        return self.path / name

    def write_folder(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Put a folder into the run directory, for people: `winner`. `fill` writes its files.

        It is whole or absent: after a crash between the old and the new one, write it again.
        """
        self._lock.check()
        _check_name(name, what="folder name")
        if name in OWN_NAMES:
            raise RunError(f"Got the folder name {name!r}: the run keeps its own things there.")
        target, retired = self.path / name, new_scratch(self._scratch)
        with self.blobs.stage() as staged, disk_boundary(f"Writing {target}"):
            fill(staged)
            sync_tree(staged)
            if target.exists():
                os.rename(target, retired)
            os.rename(staged, target)
            sync_folder(self.path)
            shutil.rmtree(retired, ignore_errors=True)
        return target

    def finish(self, outcome: Outcome = "finished", *, message: str = "") -> None:
        """Say how the run ended. Opening it again makes it a running one."""
        if outcome not in get_args(Outcome):
            raise RunError(f"Got the outcome {outcome!r}: one of {', '.join(get_args(Outcome))}.")
        self._lock.check()
        self._log.append(FINISHED, {"outcome": outcome, "message": message})
        self._has_outcome = True

    def close(self) -> None:
        """Give the run up. Without `finish` before, it counts as interrupted. Free if repeated."""
        try:
            self._metrics.close()
        finally:
            try:
                self._log.close()
            finally:
                self._lock.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """An error that leaves the block is recorded as the outcome: failed, or interrupted for
        Ctrl-C and cancellation."""
        try:
            if error is not None and not self._has_outcome:
                outcome: Outcome = "failed" if isinstance(error, Exception) else "interrupted"
                self.finish(outcome, message=f"{type(error).__name__}: {error}")
        except RunError:
            # The first error matters more, and may be the same full disk: let it through.
            logger.warning("%s: its outcome could not be recorded", self.path, exc_info=True)
        finally:
            self.close()


def _claim_folder(root: Path, name: str) -> Path:
    _check_name(name, what="name of a run")
    path = root / name
    with disk_boundary(f"Making {path}"):
        path.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in path.iterdir()}
    if not found or (LOCK in found and found <= FIRST_NAMES):
        return path
    if EVENTS in found:
        raise RunError(_exists(path))
    raise RunError(
        f"{path} is not a run and not empty (it holds {min(found)}): choose another name, or move "
        "what is there."
    )


def _claim_new_folder(root: Path, kind: str) -> Path:
    """root/genome-20260301-093000, or with -2, -3, ... behind it when that is taken."""
    stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            with disk_boundary(f"Making {path}"):
                root.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            return path
        except RunError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            number += 1


def _check_name(name: str, *, what: str) -> None:
    if not PLAIN_NAME.fullmatch(name):
        raise RunError(
            f"Got the {what} {name!r}: it is one word of letters, digits, '.', '_' and '-', and "
            "does not begin with '.' or '-'."
        )


def _exists(path: Path) -> str:
    return f"{path} already holds a run: resume it, or choose another name."


def _require_run(path: Path) -> Path:
    """The path made absolute, so that it holds when the process changes its folder."""
    if (path / EVENTS).is_file():
        return path.absolute()
    if path.exists():
        raise RunError(f"{path} is not a run: it has no {EVENTS}. Give the run's own directory.")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"Did you mean {path.parent / near[0]}?" if near else "`rookery runs list` lists them."
    raise RunError(f"There is no run {path}. {hint}")
