"""Records of a snapshot: read in one turn of the event loop, written as JSON in a thread.

    document = {"state": {"sessions": read_records(state.sessions.values())}, "pending": ["req-1"]}
    data = encode(document)              # in a thread

With thousands of tenants, `asdict` of all records takes seconds. In a thread it would see changes
that came after the snapshot, and one `json.dumps` of everything holds the interpreter until its
end, wherever it is called. So records are read as tuples, and written one after another.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

__all__ = ["Rows", "encode", "read_records"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Values that do not change any more, and what makes JSON of each."""

    values: Sequence[tuple[Any, ...]]
    describe: Callable[[tuple[Any, ...]], Any]


def read_records(records: Iterable[Any]) -> Rows:
    """Dataclasses of one kind. What their fields hold is replaced, never changed."""
    given = list(records)
    names = tuple(field.name for field in fields(given[0])) if given else ()
    read = attrgetter(*names) if given else tuple
    values = [read(record) for record in given]
    return Rows(values, lambda row: {n: _plain(v) for n, v in zip(names, row, strict=True)})


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def encode(document: Mapping[str, Any]) -> bytes:
    """JSON of mappings whose ends are Rows or plain values."""
    return b"".join(_parts(document))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Rows):
        yield b"["
        for number, row in enumerate(value.values):
            yield b"," if number else b""
            yield json.dumps(value.describe(row)).encode()
        yield b"]"
    elif isinstance(value, Mapping):
        yield b"{"
        for number, (name, own) in enumerate(value.items()):
            yield (b"," if number else b"") + json.dumps(name).encode() + b":"
            yield from _parts(own)
        yield b"}"
    else:
        yield json.dumps(value).encode()
