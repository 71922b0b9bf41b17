"""Summaries of runs, for lists and pages: which there are, how they stand, what they hold.

    for summary in list_runs(Path("runs")):
        summary.name, summary.status, summary.num_events
    with Run.view(Path("runs/poet")) as run:
        export_events(run, Path("poet.jsonl"))

Nothing here takes a lock: runs that are in progress are summed up as they are at the moment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary, sync_folder
from rookery.runs.document import encode
from rookery.runs.events import Event
from rookery.runs.run import Run
from rookery.runs.run_folder import EVENTS
from rookery.runs.run_view import RunView, Status

__all__ = [
    "RunDetails",
    "RunSummary",
    "export_events",
    "list_runs",
    "note_elsewhere",
    "show",
    "summarize",
]

NUM_LAST_EVENTS = 10
ELSEWHERE = ".elsewhere"
"""The paths of runs that are kept outside of the folder of runs, a line each; hidden, so that it
does not travel to workers."""


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
    """Without the time between an ending and the next opening."""
    num_events: int
    size_bytes: int
    message: str = ""
    """What `finish` was told, or why the run is unreadable; then kind is "" and times are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """The page of `rookery runs show`."""

    summary: RunSummary
    config: Mapping[str, Any]
    counts: Mapping[str, int]
    """Number of events of each kind."""
    latest_metrics: Mapping[str, float]
    """The newest value of every metric."""
    last_events: tuple[Event, ...]
    """The newest few, oldest first."""


def list_runs(root: Path) -> list[RunSummary]:
    """The runs directly below a folder and those noted there, the one with the newest event first.

    A damaged run is in the list with status "unreadable"; a folder that does not exist has none.
    The name of a run that is elsewhere is its path.
    """
    if not root.exists():
        return []
    if not root.is_dir():
        raise RunError(f"{root} is a file: give the folder that holds the runs.")
    with disk_boundary(f"Reading {root}"):
        paths = sorted(path for path in root.iterdir() if (path / EVENTS).is_file())
        noted = root / ELSEWHERE
        lines = noted.read_text(encoding="utf-8").splitlines() if noted.is_file() else []
    summaries = [_summarize_path(path) for path in paths]
    for path in map(Path, dict.fromkeys(lines)):
        if (path / EVENTS).is_file():
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            summaries.append(replace(_summarize_path(path), name=str(here)))
    return sorted(summaries, key=lambda summary: summary.last_event_s, reverse=True)


def note_elsewhere(root: Path, path: Path) -> None:
    """Have `list_runs(root)` list a run that is kept elsewhere."""
    if path.parent == root.absolute():
        return
    with disk_boundary(f"Noting {path} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with (root / ELSEWHERE).open("a+", encoding="utf-8") as file:
            file.seek(0)
            if f"{path}\n" not in file.readlines():
                file.write(f"{path}\n")


def show(path: Path) -> RunDetails:
    """Everything worth a page about one run."""
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
    """How a run stands now."""
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
    """Write every event as a line of JSON and return their number; `path` appears when whole.

    Of a damaged log, the events before the damage are written, and then a RunError is raised.
    """
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
    """The sizes of all files; one that goes away meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
