"""The folder of a run: which names it holds, and who may begin a run in it.

config.json     what was asked for, complete        run.lock        who owns it now
events.db       what happened, in order (SQLite)    report.json     the result, and anything
blobs/          adapters, checkpoints, programs     report.html     else by `write_*`
metrics.jsonl   numbers per step                    journal.db      requests of a server
.tmp/           half-written files                  .old/           folders being replaced
"""

import difflib
import re
import time
from pathlib import Path

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary

__all__ = [
    "BLOBS",
    "CONFIG",
    "EVENTS",
    "JOURNAL",
    "LOCK",
    "METRICS",
    "OLD",
    "SCRATCH",
    "check_free_name",
    "check_name",
    "claim_folder",
    "require_run",
    "taken",
]

CONFIG, EVENTS, LOCK, METRICS = "config.json", "events.db", "run.lock", "metrics.jsonl"
BLOBS, JOURNAL, OLD, SCRATCH = "blobs", "journal.db", ".old", ".tmp"
FIRST_NAMES = frozenset(
    {CONFIG, EVENTS, f"{EVENTS}-wal", f"{EVENTS}-shm", f"{EVENTS}-journal", LOCK, BLOBS, SCRATCH}
)
"""What `create` makes before the first event: a folder with more than these has been a run."""
OWN_NAMES = FIRST_NAMES | {METRICS, JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"}
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def claim_folder(root: Path, *, kind: str, name: str) -> Path:
    """root/name, made or empty; without a name root/genome-20260301-093000, or with -2 behind it.

    A folder in which an earlier `create` was killed is claimed again; one that holds a run, or
    anything else, is refused.
    """
    check_name(kind, what="kind of run")
    if not name:
        return _new_folder(root, kind)
    check_name(name, what="name of a run")
    path = root / name
    with disk_boundary(f"Making {path}"):
        path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
    if not names or (LOCK in names and names <= FIRST_NAMES):
        return path
    if EVENTS in names:
        raise taken(path)
    raise RunError(
        f"{path} is not a run and not empty (it holds {min(names)}): choose another name, or move "
        "what is there."
    )


def _new_folder(root: Path, kind: str) -> Path:
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


def check_name(name: str, *, what: str) -> None:
    """Raise a RunError unless it is one plain word."""
    if not PLAIN_NAME.fullmatch(name):
        raise RunError(
            f"Got the {what} {name!r}: it is one word of letters, digits, '.', '_' and '-', and "
            "does not begin with '.' or '-'."
        )


def check_free_name(name: str, *, what: str) -> None:
    """Raise a RunError for a name that is not plain, or that the run itself uses."""
    check_name(name, what=what)
    if name in OWN_NAMES:
        raise RunError(f"Got the {what} {name!r}: the run writes that {what.split()[0]} itself.")


def taken(path: Path) -> RunError:
    """The error of a folder that holds a run."""
    return RunError(f"{path} already holds a run: resume it, or choose another name.")


def require_run(path: Path) -> Path:
    """The path made absolute, so that it holds when the process changes its folder."""
    if (path / EVENTS).is_file():
        return path.absolute()
    if path.exists():
        raise RunError(f"{path} is not a run: it has no {EVENTS}. Give the run's own directory.")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"Did you mean {path.parent / near[0]}?" if near else "`rookery runs list` lists them."
    raise RunError(f"There is no run {path}. {hint}")
