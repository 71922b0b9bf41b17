"""Summaries of runs, for lists and pages: which runs exist, their status and contents.

    for summary in list_runs(Path("runs")):
        summary.name, summary.status, summary.num_events
    with Run.view(Path("runs/poet")) as run:
        export_events(run, Path("poet.jsonl"))

Nothing here takes a lock: a run in progress is summarised as it is now.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from rookery.errors import RunError
from rookery.paths import expanded
from rookery.runs.disk import disk_boundary, encode, sync_folder
from rookery.runs.event_log import Event, NewEvent
from rookery.runs.run import Run, RunView, Status
from rookery.runs.run_folder import EVENTS

__all__ = [
    "Attempt",
    "AttemptLog",
    "AttemptState",
    "RunDetails",
    "RunSummary",
    "export_events",
    "find_runs",
    "list_runs",
    "note_elsewhere",
    "read_attempts",
    "show",
    "summarize",
]

# The attempts of a run: planned, leased, generated, evaluated and decided, exactly once.
#
#     log = AttemptLog(run)
#     await log.record([Attempt(number=7, state="planned", data={"parent": "p3"})])
#     await log.record([Attempt(number=7, state="leased", epoch=1, data={"worker": "w2"})])
#     await log.record([Attempt(number=7, state="generated", epoch=1, data={"text": digest})])
#     await log.record([Attempt(number=7, state="evaluated", epoch=1, data={"score": 0.5})])
#     [kept] = await log.record([Attempt(number=7, state="committed", epoch=1, data={})])
#
# Each record is an event of the run, so no second file must be kept consistent. An attempt is
# generated once, evaluated once, and either committed or failed. The first record of each wins: a
# second one, as from a worker that seemed dead, returns the first. Epochs count the leases. The
# cost of a record does not grow with the number of attempts.


KIND = "attempt"
AttemptState = Literal["planned", "leased", "generated", "evaluated", "committed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt in one state: `Attempt(number=7, state="leased", epoch=2, data={...})`."""

    number: int
    state: AttemptState
    epoch: int = 0
    """Number of its lease; 0 for none. An expired lease is followed by the next epoch."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """A JSON object, opaque here. Large texts are blobs, named by their digest."""

    @property
    def key(self) -> str:
        """Equal for records of which only the first may count."""
        if self.state in {"committed", "failed"}:
            return f"{self.number}/decided"
        if self.state == "leased":
            return f"{self.number}/leased/{self.epoch}"
        return f"{self.number}/{self.state}"


class AttemptLog:
    """Writes attempts as events."""

    def __init__(self, run: Run, *, series: str = "") -> None:
        """`series` names a separate sequence of attempts with its own numbers."""
        self._run = run
        self._kind = _kind(series)

    async def record(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Store all or none; durable when this returns. Returns the records that count, which
        differ from the given ones if others were first."""
        return [_attempt(event) for event in await asyncio.wrap_future(self.submit(attempts))]

    def submit(self, attempts: Sequence[Attempt]) -> "Future[list[Event]]":
        """`record` without waiting. Records become durable in the order of submission."""
        news = [
            NewEvent(kind=self._kind, key=attempt.key, payload=_payload(attempt), first_wins=True)
            for attempt in attempts
        ]
        return self._run.submit(news)

    def decision(self, number: int) -> Attempt | None:
        """Return how an attempt was decided; None if it is not."""
        event = self._run.get(self._kind, f"{number}/decided")
        return None if event is None else _attempt(event)


def read_attempts(
    run: RunView, *, after: int = 0, series: str = ""
) -> Iterator[tuple[int, Attempt]]:
    """Yield every record in order with the `seq` of its event, above `after`. Records are read in
    pages, so memory does not grow with their number."""
    for event in run.events(_kind(series), after=after):
        yield event.seq, _attempt(event)


def _kind(series: str) -> str:
    return f"{KIND}/{series}" if series else KIND


def _payload(attempt: Attempt) -> dict[str, object]:
    return {
        "number": attempt.number,
        "state": attempt.state,
        "epoch": attempt.epoch,
        "data": dict(attempt.data),
    }


def _attempt(event: Event) -> Attempt:
    return Attempt(**event.payload)


NUM_LAST_EVENTS = 10
ELSEWHERE = ".elsewhere"
"""File with the paths of runs kept elsewhere, one per line; hidden: workers do not get it."""
ANY_NAME = "surrogateescape"
"""Error handler for file names that are not UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of `rookery runs list`. Times are Unix times."""

    path: Path
    kind: str
    name: str
    status: Status | Literal["unreadable"]
    started_s: float
    last_event_s: float
    worked_s: float
    """Seconds worked, without the time between an ending and the next opening."""
    num_events: int
    size_bytes: int
    message: str = ""
    """Message of `finish`, or why the run is unreadable; then kind is "" and times are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """The page of `rookery runs show`."""

    summary: RunSummary
    config: Mapping[str, Any]
    counts: Mapping[str, int]
    """Number of events of each kind."""
    latest_metrics: Mapping[str, float]
    """Newest value of every metric."""
    last_events: tuple[Event, ...]
    """The newest few, oldest first."""


def list_runs(root: Path) -> list[RunSummary]:
    """Return the runs in a folder and those noted there, by newest event first.

    A damaged run is listed with status "unreadable". A folder that does not exist has no runs. A
    run elsewhere has its path as name.
    """
    summaries = []
    for path in find_runs(root):
        summary = _summarize_path(path)
        if path.parent != root:
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            summary = replace(summary, name=str(here))
        summaries.append(summary)
    return sorted(summaries, key=lambda summary: summary.last_event_s, reverse=True)


def find_runs(root: Path) -> list[Path]:
    """Return the folders of the runs in a folder, then those noted there."""
    if not expanded(root).exists():
        return []
    if not root.is_dir():
        raise RunError(f"{root} is a file: give the folder that holds the runs.")
    with disk_boundary(f"Reading {root}"):
        paths = sorted(path for path in root.iterdir() if _is_run(path))
        noted = root / ELSEWHERE
        text = noted.read_text(encoding="utf-8", errors=ANY_NAME) if noted.is_file() else ""
    elsewhere = [Path(line) for line in dict.fromkeys(text.split("\n")) if line]
    return paths + [path for path in elsewhere if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Whether it holds a run that this user may read."""
    return os.path.isfile(path / EVENTS)


def note_elsewhere(root: Path, path: Path) -> None:
    """Make `list_runs(root)` list a run that is kept elsewhere."""
    if path.parent == root.absolute():
        return
    with disk_boundary(f"Noting {path} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with (root / ELSEWHERE).open("a+", encoding="utf-8", errors=ANY_NAME) as file:
            file.seek(0)
            if f"{path}\n" not in file.readlines():
                file.write(f"{path}\n")


def show(path: Path) -> RunDetails:
    """Return the details of one run for a page."""
    with Run.view(path) as run:
        newest = run.last()
        after = max(0, newest.seq - NUM_LAST_EVENTS) if newest else 0
        latest = {name: value for row in run.metrics() for name, value in row.values.items()}
        return RunDetails(
            summary=summarize(run),
            config=run.config,
            counts=run.counts(),
            latest_metrics=latest,
            last_events=tuple(run.events(after=after)),
        )


def summarize(run: RunView) -> RunSummary:
    """Summarise the current state of a run."""
    ending = run.ending
    newest = run.last() or run.created
    return RunSummary(
        path=run.path,
        kind=run.kind,
        name=run.name,
        status=run.status,
        started_s=run.created.time_s,
        last_event_s=newest.time_s,
        worked_s=run.worked_s,
        num_events=newest.seq,
        size_bytes=_size_bytes(run.path),
        message=str(ending.payload["message"]) if ending is not None else "",
    )


def export_events(run: RunView, path: Path) -> int:
    """Write every event as a line of JSON and return their number; `path` appears when complete. If
    the log is damaged, the events before the damage are written, then RunError is raised."""
    partial = path.with_name(f".{path.name}.partial")
    with disk_boundary(f"Writing {path}"):
        try:
            with partial.open("w", encoding="utf-8") as file:
                num_events, damage = _write_lines(run, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:  # Ctrl-C too: no half file is left
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    if damage is not None:
        raise RunError(f"{path} has the first {num_events} events only. {damage}") from damage
    return num_events


def _write_lines(run: RunView, file: TextIO) -> tuple[int, RunError | None]:
    num_events = 0
    try:
        for event in run.events():
            file.write(_line(event) + "\n")
            num_events += 1
    except RunError as damage:
        return num_events, damage
    return num_events, None


def _line(event: Event) -> str:
    document = {
        "seq": event.seq,
        "kind": event.kind,
        "key": event.key,
        "time_s": event.time_s,
        "payload": event.payload,
    }
    return encode(document, what=f"Event {event.seq}")


def _summarize_path(path: Path) -> RunSummary:
    try:
        with Run.view(path) as run:
            return summarize(run)
    except RunError as error:
        return RunSummary(
            path=path,
            kind="",
            name=path.name,
            status="unreadable",
            started_s=0.0,
            last_event_s=0.0,
            worked_s=0.0,
            num_events=0,
            size_bytes=_size_bytes(path),
            message=str(error),
        )


def _size_bytes(folder: Path) -> int:
    """Sum the sizes of all files; a file removed meanwhile counts 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
