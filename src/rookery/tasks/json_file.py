"""A whole JSON file as rows: a list of objects, such a list under a key, or columns.

[{"prompt": "2+2=", "answer": "4"}, ...]
{"version": 2, "data": [{"prompt": "2+2=", "answer": "4"}, ...]}     the only list in it
{"dev": [{...}, ...], "test": [{...}, ...]}                          key: test
{"prompt": ["2+2=", ...], "answer": ["4", ...]}                      columns
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rookery.errors import TaskError
from rookery.tasks.jsonl import near_name, read_jsonl, refuse_constant
from rookery.tasks.rows import Row, require_plain

__all__ = ["read_json"]

_EXAMPLE = '[{"prompt": "2+2=", "answer": "4"}, ...]'


def read_json(
    path: Path, *, key: str = "", on_bad: Callable[[TaskError], None] | None = None
) -> Iterator[Row]:
    """The rows of a file, those under `key` where it holds several lists (`data.test` goes deeper).

    JSON lines in a file called .json are read as such. An item that is not an object is handed to
    `on_bad` and left out; without one it is raised.
    """
    document = _load(path)
    if document is None:
        yield from read_jsonl(path, on_bad=on_bad)
        return
    place, items = _rows_in(document, key=key, path=path)
    for number, item in enumerate(items, start=1):
        where = f"{path} {place} row {number}" if place else f"{path} row {number}"
        try:
            row = _row(item, where)
        except TaskError as error:
            if on_bad is None:
                raise
            on_bad(error)
            continue
        yield row


def _row(item: object, where: str) -> Row:
    if not isinstance(item, dict):
        raise TaskError(f"{where}: holds {_kind(item)}; a row is an object, as in {_EXAMPLE}.")
    require_plain(item, where=where)
    return Row(where=where, fields=item)


def _load(path: Path) -> Any:
    """The document, or None when the file holds JSON lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return json.loads(text, parse_constant=refuse_constant)
    except FileNotFoundError:
        raise TaskError(f"There is no file {path}.{near_name(path)}") from None
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text[: error.pos].lstrip().startswith("{"):
            return None
        raise TaskError(f"{path} is not JSON: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not JSON: {error}.") from None


def _rows_in(document: Any, *, key: str, path: Path) -> tuple[str, list[Any]]:
    """Where the rows are, and the rows."""
    node = _at(document, key, path)
    if isinstance(node, list):
        return key, node
    if not isinstance(node, dict):
        raise TaskError(f"{path} holds {_kind(node)}; rows are a list of objects, {_EXAMPLE}.")
    if _is_columns(node):
        rows = [dict(zip(node, row, strict=True)) for row in zip(*node.values(), strict=True)]
        return key, rows
    lists = _lists(node, f"{key}." if key else "")
    if len(lists) == 1:
        return next(iter(lists.items()))
    if lists:
        named = ", ".join(f"{name} ({len(rows):,} rows)" for name, rows in lists.items())
        raise TaskError(
            f"{path} holds {len(lists)} lists of rows: {named}. Say which with key, such as "
            f"key: {next(iter(lists))} in the taskset's config or "
            f"{path.name}?key={next(iter(lists))} on the command line."
        )
    raise TaskError(f"{path} holds {_contents(node)}; rows are a list of objects, {_EXAMPLE}.")


def _at(document: Any, key: str, path: Path) -> Any:
    node = document
    for part in key.split(".") if key else []:
        if not isinstance(node, dict) or part not in node:
            here = _contents(node) if isinstance(node, dict) else _kind(node)
            raise TaskError(f"{path} has no {key!r}: where {part!r} should be it holds {here}.")
        node = node[part]
    return node


def _lists(document: Mapping[str, Any], prefix: str) -> dict[str, list[Any]]:
    """The lists of objects in an object and one level below, by dotted name."""
    found: dict[str, list[Any]] = {}
    for name, value in document.items():
        if _is_rows(value):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, dict) and prefix.count(".") < 1:
            found |= _lists(value, f"{prefix}{name}.")
    return found


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _is_columns(document: Mapping[str, Any]) -> bool:
    columns = list(document.values())
    return (
        all(isinstance(column, list) for column in columns)
        and len({len(column) for column in columns}) == 1
        and not all(_is_rows(column) for column in columns)
    )


def _contents(document: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!r} ({_kind(value)})" for name, value in document.items()) or "nothing"


def _kind(value: object) -> str:
    match value:
        case list():
            return f"a list of {len(value):,}"
        case dict():
            return f"an object of {len(value):,} keys"
        case str():
            return "a text"
        case None:
            return "null"
    return json.dumps(value)
