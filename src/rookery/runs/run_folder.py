"""The folder of a run: its names, how a run claims it, and references to other runs' folders.

config.json     the complete config                 run.lock        the current owner
events.db       all events in order (SQLite)        report.json     the result, and anything
blobs/          adapters, checkpoints, programs     report.html     else by `write_*`
metrics.jsonl   numbers per step                    journal.db      requests of a server
.tmp/           half-written files                  .old/           folders being replaced

A config may write `run:NAME/PART` in place of any path to a file or a folder:

    resolve_references({"init": {"path": "run:tutor/trained"}}, find=in_folder(Path("runs")))
    find_sources(config)         [TakenPart(key="init.path", run=Path(".../tutor"), part="trained")]

Reading a config replaces it by the path, so that a run's config.json names the path, and thereby
the run that it was made from.
"""

import fnmatch
import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.errors import ConfigError, RunError, did_you_mean, near_path
from rookery.paths import expanded
from rookery.runs.disk import disk_boundary, require_free

__all__ = [
    "BLOBS",
    "CONFIG",
    "EVENTS",
    "JOURNAL",
    "LOCK",
    "METRICS",
    "OLD",
    "SCRATCH",
    "Changes",
    "Find",
    "TakenPart",
    "check_changes",
    "check_free_name",
    "check_name",
    "claim_folder",
    "find_changes",
    "find_names",
    "find_sources",
    "in_folder",
    "require_run",
    "resolve_references",
    "resolve_text",
    "taken",
]


# Changes of a run's config, and whether they are allowed: a finished run can be extended.
#
#     find_changes({"steps": 100, "seed": 1}, {"steps": 200, "seed": 1})    {"steps": (100, 200)}
#     check_changes(changes, may_change=["steps", "stages.*.generations"])
#
# A run has one config, because its result is a function of it. A loop may name values that only say
# how far to go (evolve does): these may change when the run is opened again.


Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> (value of the run, value now)."""


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> Changes:
    """Return the values that differ. A missing key counts as None."""
    changes: Changes = {}
    for name in {**old, **new}:  # in their order
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            before, after = _by_index(before), _by_index(after)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= find_changes(before, after, prefix=f"{key}.")
        elif before != after or type(before) is not type(after):
            changes[key] = (before, after)
    return changes


def check_changes(changes: Changes, *, may_change: Collection[str]) -> None:
    """Raise a RunError that names values which may not change; patterns may contain `*`."""
    refused = {
        key: pair
        for key, pair in changes.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in may_change)
    }
    if refused:
        listed = "; ".join(
            f"{key} is {_show(old)} there, {_show(new)} here" for key, (old, new) in refused.items()
        )
        allowed = f"Only {', '.join(sorted(may_change))} may" if may_change else "None of it may"
        raise RunError(
            f"The run was made with another config: {listed}. {allowed} change when a run goes "
            "on: take the old values, or start a new run."
        )


def _by_index(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


CONFIG, EVENTS, LOCK, METRICS = "config.json", "events.db", "run.lock", "metrics.jsonl"
BLOBS, JOURNAL, OLD, SCRATCH = "blobs", "journal.db", ".old", ".tmp"
FIRST_NAMES = frozenset(
    {CONFIG, EVENTS, f"{EVENTS}-wal", f"{EVENTS}-shm", f"{EVENTS}-journal", LOCK, BLOBS, SCRATCH}
)
"""Names made before the first event: a folder with more names has been a run."""
OWN_NAMES = FIRST_NAMES | {METRICS, JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"}
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def claim_folder(root: Path, *, kind: str, name: str) -> Path:
    """Make and return root/name. Without a name, it is root/genome-20260301-093000 or the like,
    with -2 and so on if taken.

    A folder in which an earlier `create` was killed is claimed again; a folder that holds a run, or
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
        require_free(path / LOCK)
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
    """Raise a RunError unless the name is one plain word."""
    if not PLAIN_NAME.fullmatch(name):
        raise RunError(
            f"Got the {what} {name!r}: it is one word of at most 200 letters, digits, '.', '_' and "
            "'-', and does not begin with '.' or '-'."
        )


def check_free_name(name: str, *, what: str) -> None:
    """Raise a RunError if a name is not plain, or if the run itself uses it."""
    check_name(name, what=what)
    if name in OWN_NAMES:
        raise RunError(f"Got the {what} {name!r}: the run writes that {what.split()[0]} itself.")


def taken(path: Path) -> RunError:
    """Return the error for a folder that already holds a run."""
    return RunError(f"{path} already holds a run: resume it, or choose another name.")


def require_run(path: Path) -> Path:
    """Return the run's absolute path, which stays valid if the process changes its folder."""
    if expanded(path / EVENTS).is_file():
        return path.absolute()
    if path.exists():
        raise RunError(f"{path} is not a run: it has no {EVENTS}. Give the run's own directory.")
    hint = near_path(path) or " `rookery runs list` lists them."
    raise RunError(f"There is no run {path}.{hint}")


PREFIX = "run:"
REFERENCE = re.compile(r"run:(?P<name>\w[\w.-]*)(?:/(?P<part>[^?]*))?(?P<options>\?.*)?")
"""A prompt may begin with `run: `, which is no reference."""
HIDDEN = frozenset(
    {"blobs", "config.json", "entrants.json", "inputs.json", "metrics.jsonl", "run.lock",
     "progress.json", "steps.json"}
)  # fmt: skip
"""Files not offered as parts of a run, besides names that begin with `events.db` or a dot."""

Find = Callable[[str], Path | None]
"""Run name -> its folder, which need not exist; None leaves the reference unresolved."""


@dataclass(frozen=True, slots=True)
class TakenPart:
    """A part of another run that a config value refers to."""

    key: str
    run: Path
    part: str


def in_folder(runs_dir: str | Path) -> Find:
    """Find runs by name in a folder."""
    return lambda name: Path(runs_dir).absolute() / name


def resolve_references(
    document: Any, *, find: Find, later: Collection[str] = (), key: str = ""
) -> Any:
    """Return the document with every reference replaced by its path; ConfigError if that is
    missing. Sections in `later` keep their references."""
    match document:
        case Mapping():
            return {
                name: value
                if name in later
                else resolve_references(value, find=find, key=_join(key, name))
                for name, value in document.items()
            }
        case list() | tuple():
            return [
                resolve_references(value, find=find, key=_join(key, index))
                for index, value in enumerate(document)
            ]
        case str() | Path():
            return (
                resolve_text(str(document), find=find, key=key) if _refers(document) else document
            )
        case _:
            return document


def _refers(value: str | Path) -> bool:
    return REFERENCE.fullmatch(str(value)) is not None


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def resolve_text(text: str, *, find: Find, key: str) -> str:
    """Return the path that a text refers to, or the text itself. Options of a taskset are kept:
    `run:labels/sft.jsonl?bad_rows=skip`."""
    reference = REFERENCE.fullmatch(text)
    run_path = None if reference is None else find(reference["name"])
    if reference is None or run_path is None:
        return text
    folder, part = expanded(run_path), reference["part"] or ""
    if not (folder / EVENTS).is_file():
        raise ConfigError(f"{key} is {text}: there is no run {folder}.{_nearest(folder)}")
    path = folder / part
    is_inside = not Path(part).is_absolute() and ".." not in Path(part).parts
    if not is_inside or not path.exists():
        parts = ", ".join(_parts(folder)) or "nothing yet"
        hint = _ended(folder) if is_inside else ""
        raise ConfigError(
            f"{key} is {text}: the run has no {part}. It has {parts}.{hint}{_steps(folder, part)}"
        )
    return f"{path}{reference['options'] or ''}"


def _nearest(folder: Path) -> str:
    runs = [path.parent.name for path in folder.parent.glob(f"*/{EVENTS}")]
    return did_you_mean(folder.name, runs, shown=lambda name: f"{PREFIX}{name}")


def _ended(folder: Path) -> str:
    if (folder / "report.json").exists():
        return ""
    resume = f"rookery runs resume {shlex.quote(str(folder))}"
    return f" It has not ended: wait for it, or go on with it by `{resume}`."


def _steps(folder: Path, part: str) -> str:
    """For a pipeline or a league, name its steps that have the part."""
    runs = sorted(folder.parent.glob(f"{folder.name}.*/{EVENTS}")) if part else []
    named = [f"{PREFIX}{path.parent.name}/{part}" for path in runs if (path.parent / part).exists()]
    return f" Its steps have: {', '.join(named)}." if named else ""


def _parts(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    return [
        name for name in names if name not in HIDDEN and not name.startswith((".", "events.db"))
    ]


def find_names(document: Any) -> list[tuple[str, str, str]]:
    """Return (key, reference, name of the run) of every reference in a document."""
    matches = [(key, REFERENCE.fullmatch(text)) for key, text in _texts(document, "")]
    return [(key, ref[0], ref["name"]) for key, ref in matches if ref is not None]


def find_sources(config: Mapping[str, Any]) -> list[TakenPart]:
    """Return the config's paths that lie in other runs' folders."""
    return [source for key, text in _texts(config, "") if (source := _source(key, text))]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, _join(key, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, _join(key, index))
    elif isinstance(value, str | Path):
        yield key, str(value)


def _source(key: str, text: str) -> TakenPart | None:
    path = Path(text.partition("?")[0])
    with suppress(OSError):  # a prompt that begins with a slash is too long for a path
        for folder in path.parents if path.is_absolute() else ():
            if (folder / EVENTS).is_file():
                return TakenPart(key, folder, str(path.relative_to(folder)))
    return None
