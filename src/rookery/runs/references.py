"""What one run takes from another: `run:NAME/PART` in a config, and the chain it leaves.

    resolve_references({"init": {"path": "run:tutor/trained"}}, find=in_folder(Path("runs")))
    find_sources(config)          [Source(key="init.path", run=Path(".../tutor"), part="trained")]

A reference stands wherever a file or a folder may: it becomes that path when a config is read, so
that a run's own config.json names the path, and by it the run that it was made from.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.errors import ConfigError, did_you_mean
from rookery.runs.run_folder import EVENTS

__all__ = [
    "Find",
    "Source",
    "find_names",
    "find_sources",
    "in_folder",
    "resolve_references",
    "resolve_text",
]

PREFIX = "run:"
REFERENCE = re.compile(r"run:(?P<name>\w[\w.-]*)(?:/(?P<part>[^?]*))?(?P<options>\?.*)?")
"""A prompt may begin with `run: ` and is none."""
HIDDEN = frozenset({"blobs", "config.json", "inputs.json", "metrics.jsonl", "run.lock"})
"""Of a run's folder, what nobody takes; neither what begins with `events.` or a dot."""

Find = Callable[[str], Path]
"""The folder of a run by its name; it need not exist."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a value of a config takes from another run."""

    key: str
    run: Path
    part: str


def in_folder(runs_dir: str | Path) -> Find:
    """Runs by their names in a folder."""
    return lambda name: Path(runs_dir).absolute() / name


def resolve_references(
    document: Any, *, find: Find, later: Collection[str] = (), key: str = ""
) -> Any:
    """The document with the path in place of every reference; ConfigError where there is none.
    Those in the sections `later` stay."""
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
    """The path that a text refers to, or the text as it is. Options of a taskset stay behind it:
    `run:labels/sft.jsonl?bad_rows=skip`."""
    reference = REFERENCE.fullmatch(text)
    if reference is None:
        return text
    folder, part = find(reference["name"]), reference["part"] or ""
    if not (folder / EVENTS).is_file():
        raise ConfigError(f"{key} is {text}: there is no run {folder}.{_nearest(folder)}")
    path = folder / part
    if ".." in Path(part).parts or not path.exists():
        parts = ", ".join(_parts(folder)) or "nothing yet: is it finished?"
        raise ConfigError(f"{key} is {text}: the run has no {part}. It has {parts}")
    return f"{path}{reference['options'] or ''}"


def _nearest(folder: Path) -> str:
    runs = [path.parent.name for path in folder.parent.glob(f"*/{EVENTS}")]
    return did_you_mean(folder.name, runs, shown=lambda name: f"{PREFIX}{name}")


def _parts(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    return [
        name for name in names if name not in HIDDEN and not name.startswith((".", "events.db"))
    ]


def find_names(document: Any) -> list[tuple[str, str]]:
    """(key, name of the run) of every reference in a document."""
    found = [(key, REFERENCE.fullmatch(text)) for key, text in _texts(document, "")]
    return [(key, reference["name"]) for key, reference in found if reference is not None]


def find_sources(config: Mapping[str, Any]) -> list[Source]:
    """What a run's config takes from other runs: each path in it that lies in a run's folder."""
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


def _source(key: str, text: str) -> Source | None:
    path = Path(text.partition("?")[0])
    for folder in path.parents if path.is_absolute() else ():
        if (folder / EVENTS).is_file():
            return Source(key, folder, str(path.relative_to(folder)))
    return None
