"""A run: a directory that holds everything about one execution and from which it resumes.

    with Run.create(Path("runs"), kind="genome", name="poet", config=document) as run:
        await run.append("evaluation", {"candidate": "c1", "score": 0.5}, key="0/c1")
        run.log_metrics(0, {"score/best": 0.5})
        run.finish()

    with Run.open(Path("runs/poet")) as run:           # after a crash
        done = {event.key for event in run.events("evaluation")}

One process owns a run at a time; `Run.view` reads it meanwhile. Awaited appends wait for the disk
in a thread. `create`, `open`, `finish`, `close` and `write_*` block until the disk is done: in a
shared event loop, call them through `asyncio.to_thread`. Forked children may not write.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from rookery.errors import RunError
from rookery.runs.blobs import BlobStore, BlobView
from rookery.runs.disk import (
    RunLock,
    decode,
    disk_boundary,
    encode,
    is_locked,
    recover_folders,
    replace_folder,
    require_free,
    sweep,
    sync_folder,
    sync_tree,
    write_file,
)
from rookery.runs.event_log import Event, EventLog, EventView, NewEvent
from rookery.runs.journal import Journal
from rookery.runs.metrics import MetricsFile, MetricsRow, read_metrics
from rookery.runs.run_folder import (
    BLOBS,
    CONFIG,
    EVENTS,
    JOURNAL,
    LOCK,
    METRICS,
    OLD,
    SCRATCH,
    Changes,
    check_changes,
    check_free_name,
    check_name,
    claim_folder,
    find_changes,
    require_run,
    taken,
)

__all__ = [
    "CREATED",
    "EXTENDED",
    "FINISHED",
    "OPENED",
    "SET_ASIDE",
    "Outcome",
    "Run",
    "RunView",
    "Status",
]


Outcome = Literal["finished", "failed", "interrupted"]
Status = Literal["running", "finished", "failed", "interrupted"]
CREATED, OPENED, FINISHED = "run/created", "run/opened", "run/finished"


class RunView:
    """Read access to a run, without lock or changes; its owner may write meanwhile."""

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
        """Kind of the run: "genome", "grpo", "icm", "evolve", "eval", ..."""
        return str(self.created.payload["kind"])

    @property
    def name(self) -> str:
        return str(self.created.payload["name"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config it was created with, including changes by `extend`."""
        document = self.read_json(CONFIG)
        if not isinstance(document, dict):
            raise RunError(f"{self.path / CONFIG} is damaged: it holds no JSON object.")
        return document

    @property
    def status(self) -> Status:
        """Outcome of the last owner; without one, `running` if it lives, else `interrupted`."""
        lock = self.path / LOCK
        had_owner = is_locked(lock)  # also asked first: the owner may finish and leave meanwhile
        ending = self.ending
        if ending is not None:
            outcome: Outcome = ending.payload["outcome"]
            return outcome
        return "running" if had_owner or is_locked(lock) else "interrupted"

    def require_free(self) -> None:
        """Raise the RunError of `Run.open` if a process owns the run."""
        require_free(self.path / LOCK)

    @property
    def ending(self) -> Event | None:
        """The event of `finish`, {"outcome", "message"}; None if the run was opened again since."""
        finished, opened = self.last(FINISHED), self.last(OPENED)
        if finished is None or (opened is not None and opened.seq > finished.seq):
            return None
        return finished

    def events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Yield events of one kind, or all, with `seq` above `after`, in order."""
        return self._log.events(kind, after=after)

    def last(self, kind: str | None = None) -> Event | None:
        """Return the newest event, of one kind or of all."""
        return self._log.last(kind)

    def get(self, kind: str, key: str) -> Event | None:
        """Return the event appended under a key."""
        return self._log.get(kind, key)

    def find(self, kind: str, keys: Sequence[str]) -> dict[str, Event]:
        """Return the events appended under any of these keys, by key."""
        return self._log.find(kind, keys)

    def fields(self, kind: str, names: Sequence[str], *, after: int = 0) -> Iterator[list[Any]]:
        """Yield each event's seq and these payload fields, see `EventView.fields`."""
        return self._log.fields(kind, names, after=after)

    def keyed(self, kind: str, prefix: str) -> list[Event]:
        """Return the events of a kind whose key has this prefix, in order; only these are read."""
        return self._log.keyed(kind, prefix)

    def page(
        self, kind: str = "", *, text: str = "", offset: int = 0, limit: int = 100
    ) -> tuple[int, list[tuple[int, str, str, str, float]]]:
        """Return a page of a long list of events, see `EventView.page`."""
        return self._log.page(kind, text=text, offset=offset, limit=limit)

    def counts(self) -> dict[str, int]:
        """Return the number of events of each kind."""
        return self._log.counts()

    @property
    def worked_s(self) -> float:
        """Seconds from each opening of the run to the last event before the next opening."""
        openings = [self.created, *self.events(OPENED)]
        newest = self.last() or self.created
        ends = [self._log.time_s(opening.seq - 1) for opening in openings[1:]] + [newest.time_s]
        spans = zip(openings, ends, strict=True)
        return sum(max(0.0, end - opening.time_s) for opening, end in spans)

    def metrics(self) -> list[MetricsRow]:
        """Return the logged metrics, one row per step."""
        return read_metrics(self.path / METRICS)

    def read_json(self, name: str) -> Any:
        """Return a document that `write_json` wrote."""
        check_name(name, what="file name")
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


EXTENDED, JOURNAL_MADE, SET_ASIDE = "run/extended", "run/journal", "run/set_aside"

logger = logging.getLogger(__name__)


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
        self._journal: Journal | None = None
        self._has_outcome = False

    @classmethod
    def create(
        cls, root: Path, *, kind: str, config: Mapping[str, object], name: str = ""
    ) -> "Run":
        """Begin the run `root/name` and own it. Without a name, kind and time make one.

        `config` is `config.model_dump(mode="json")`. A folder in which an earlier `create` was
        killed is claimed again; a folder that holds a run, or anything else, is refused.
        """
        document = encode(dict(config), what="The config", indent=2)
        root = root.absolute()
        path = claim_folder(root, kind=kind, name=name)
        with ExitStack() as undo:
            lock = RunLock.acquire(path / LOCK)
            undo.callback(lock.release)
            sweep(path / SCRATCH)
            log = EventLog.open(path / EVENTS, create=True)
            undo.callback(log.close)
            if log.last() is not None:
                raise taken(path)
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
        """Own an existing run to resume it: repair the effects of a crash, refuse damage."""
        path = require_run(path)
        with ExitStack() as undo:
            lock = RunLock.acquire(path / LOCK)
            undo.callback(lock.release)
            sweep(path / SCRATCH)
            recover_folders(path, old=path / OLD)
            log = EventLog.open(path / EVENTS)
            undo.callback(log.close)
            run = cls(path, log=log, lock=lock)
            undo.callback(run.close)
            log.append(OPENED, {"pid": os.getpid()})
            undo.pop_all()
        return run

    @staticmethod
    def view(path: Path) -> RunView:
        """Open a run for reading, even if another process owns it."""
        path = require_run(path)
        with ExitStack() as undo:
            log = EventView.view(path / EVENTS)
            undo.callback(log.close)
            view = RunView(path, log, BlobView(path / BLOBS))
            undo.pop_all()
        return view

    async def append(self, kind: str, payload: Mapping[str, object], *, key: str = "") -> Event:
        """Store one event; durable when this returns. See `EventLog.submit` for keys.

        Concurrent appends share one wait for the disk, in a thread. Cancelling a waiting append
        does not undo it.
        """
        return (await self.append_many([NewEvent(kind=kind, payload=payload, key=key)]))[0]

    async def append_many(self, news: Sequence[NewEvent]) -> list[Event]:
        """Store all events or none."""
        return await asyncio.wrap_future(self.submit(news))

    def append_blocking(self, kind: str, payload: Mapping[str, object], *, key: str = "") -> Event:
        """`append` for a thread that runs no event loop."""
        return self.append_many_blocking([NewEvent(kind=kind, payload=payload, key=key)])[0]

    def append_many_blocking(self, news: Sequence[NewEvent]) -> list[Event]:
        """`append_many` for a thread that runs no event loop."""
        _refuse_event_loop()
        return self.submit(news).result()

    def submit(self, news: Sequence[NewEvent]) -> "Future[list[Event]]":
        """Queue events to be stored, all or none, without waiting; the future completes when they
        are durable. The caller must check it, since it may hold a RunError."""
        for new in (news := list(news)):
            if new.kind.startswith("run/"):
                raise RunError(f"Got the kind {new.kind!r}: kinds in run/ are written by the run.")
        self._lock.check()
        return self._log.submit(news)

    def open_journal(self) -> Journal:
        """Return the run's journal, which is closed with the run. The first call waits for the
        disk.

        A lost journal is refused. A new one would count from 1 again, and a snapshot with a higher
        number would skip its entries.
        """
        self._lock.check()
        if self._journal is None:
            path = self.path / JOURNAL
            is_known = self.get(JOURNAL_MADE, JOURNAL_MADE) is not None
            if is_known and not path.exists():
                raise RunError(
                    f"{path} is lost, and with it what was accepted since the last snapshot: "
                    "restore the run directory from a copy, or start a new run."
                )
            self._journal = Journal.open(path, create=not is_known)
            self._log.append(JOURNAL_MADE, {}, key=JOURNAL_MADE)
        return self._journal

    def extend(self, config: Mapping[str, Any], *, may_change: Collection[str]) -> Changes:
        """Replace the config, complete as for `create`, to change how far the run goes.

        `may_change` names the allowed values, such as "steps" or "stages.*.generations"; any other
        change is a RunError. Returns the changes.
        """
        self._lock.check()
        document = encode(dict(config), what="The config", indent=2)
        changes = find_changes(self.config, json.loads(document))
        check_changes(changes, may_change=may_change)
        if changes:
            # The file counts: a crash before the event loses only the note.
            write_file(self.path / CONFIG, document.encode() + b"\n", scratch=self._scratch)
            noted = {key: {"from": old, "to": new} for key, (old, new) in changes.items()}
            self._log.append(EXTENDED, {"changes": noted})
        return changes

    def set_aside(
        self,
        kinds: Collection[str],
        *,
        keep: Callable[[Event], bool] = lambda _: False,
        key: Callable[[Event], str] = lambda event: event.key,
    ) -> None:
        """Exclude events of these kinds, and record it; they are kept as former/KIND, under the
        given keys. Call it before any append."""
        self._lock.check()
        self._log.set_aside(kinds, keep=keep, key=key)
        self._log.append(SET_ASIDE, {"kinds": sorted(kinds)})

    @property
    def elapsed_s(self) -> float:
        """`worked_s` up to now, since the last event may be old."""
        newest = self.last() or self.created
        return self.worked_s + max(0.0, time.time() - newest.time_s)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append {"area/name": number} of a step to metrics.jsonl. See `runs/metrics.py`."""
        self._lock.check()
        self._metrics.log(step, metrics)

    def write_json(self, name: str, value: object) -> Path:
        """Write a JSON document into the run directory, replacing it as a whole: `report.json`."""
        return self.write_text(name, encode(value, what=name, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file into the run directory, replacing it as a whole: `report.html`."""
        self._lock.check()
        check_free_name(name, what="file name")
        write_file(self.path / name, text.encode(errors="backslashreplace"), scratch=self._scratch)
        return self.path / name

    def write_folder(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Write a folder into the run directory, for people: `best`, `checkpoints/step_100`.

        `fill` writes its files. An existing folder of that name is replaced as a whole, and is
        never absent or half-written (`replace_folder`).
        """
        target = self._folder(name)
        with self.blobs.stage() as staged, disk_boundary(f"Writing {target}"):
            fill(staged)
            sync_tree(staged)
            replace_folder(staged, target, root=self.path, old=self.path / OLD)
        return target

    def remove_folder(self, name: str) -> None:
        """Delete a folder of `write_folder` as a whole. Idempotent."""
        target = self._folder(name)
        with self.blobs.stage() as staged, disk_boundary(f"Removing {target}"):
            if target.exists():
                os.rename(target, staged / target.name)
                sync_folder(target.parent)

    def _folder(self, name: str) -> Path:
        """Return the path of a folder for people, checking the lock and the name."""
        self._lock.check()
        first, *rest = name.split("/")
        check_free_name(first, what="folder name")
        for part in rest:
            check_name(part, what="folder name")
        return self.path / name

    def finish(self, outcome: Outcome = "finished", *, message: str = "") -> None:
        """Record how the run ended. Opening it again makes it a running one."""
        if outcome not in get_args(Outcome):
            raise RunError(f"Got the outcome {outcome!r}: one of {', '.join(get_args(Outcome))}.")
        self._lock.check()
        self._log.append(FINISHED, {"outcome": outcome, "message": message})
        self._has_outcome = True

    def close(self) -> None:
        """Store queued events and release the run; interrupted without `finish`. Idempotent."""
        with ExitStack() as last_first:
            last_first.callback(self._lock.release)
            last_first.callback(self._log.close)
            if self._journal is not None:
                last_first.callback(self._journal.close)
            last_first.callback(self._metrics.close)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record an error in the block: failed, or interrupted for Ctrl-C and cancellation."""
        try:
            if error is not None and not self._has_outcome:
                outcome: Outcome = "failed" if isinstance(error, Exception) else "interrupted"
                self.finish(outcome, message=f"{type(error).__name__}: {error}")
        except RunError as problem:
            # The first error matters more, and may be the same full disk: let it through.
            logger.warning("%s: its outcome could not be recorded: %s", self.path, problem)
        finally:
            self.close()


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RunError(
        "A blocking append was called in an event loop, which would wait for the disk: write "
        "`await run.append(...)`."
    )
