"""Rows from files: JSON lines, JSON and CSV."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rookery.errors import TaskError, boundary, install_extra, near_path
from rookery.paths import expanded
from rookery.tasks.rows import Row, require_plain

__all__ = ["LOCAL_FORMATS", "read_dataset", "read_json", "read_jsonl"]


def read_jsonl(path: Path, *, on_bad: Callable[[TaskError], None] | None = None) -> Iterator[Row]:
    """Yield the rows of a JSON lines file; blank lines are skipped but count as line numbers.

    A line that is not a JSON object is skipped and passed to `on_bad`; without `on_bad` it raises.
    """
    if path.is_dir():
        raise TaskError(f"{path} is a folder; give a file of JSON lines.")
    try:
        # Binary mode, so that a decoding error names its line.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not content.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    fields = _parse(content, where=where)
                except TaskError as error:
                    if on_bad is None:
                        raise
                    on_bad(error)
                    continue
                yield Row(where=where, fields=fields)
    except FileNotFoundError:
        raise TaskError(f"There is no file {path}.{near_path(path)}") from None
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}.") from error


def _parse(line: bytes, *, where: str) -> dict[str, object]:
    try:
        row = json.loads(line.decode().rstrip(), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: is not UTF-8 (byte {error.start}): save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise TaskError(
            f"{where}: is not JSON ({error.msg} at column {error.colno}): {_shown(line)}. "
            'A row is one object on one line, such as {"prompt": "2+2=", "answer": "4"}.'
        ) from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: is not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise TaskError(
            f"{where}: holds a JSON {type(row).__name__}, {_shown(line)}; a row is one object, "
            'such as {"prompt": "2+2=", "answer": "4"}.'
        )
    require_plain(row, where=where)
    return row


def refuse_constant(name: str) -> object:
    """A `parse_constant` for `json` that refuses NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not a JSON value; write null or a number")


def _shown(line: bytes) -> str:
    text = line.decode().strip()
    return text if len(text) <= 60 else text[:57] + "..."


def read_csv(path: Path, *, on_bad: Callable[[TaskError], None] | None = None) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the fields. Cells are text; empty and
    missing ones are null. Blank lines are skipped.

    A row with more cells than names is skipped and passed to `on_bad`; without `on_bad` it raises.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Strict: an unclosed quote would otherwise swallow the rest of the file.
            table = csv.reader(file, strict=True)
            names = next(table, [])
            _require_distinct(names, path)
            for cells in filter(None, table):
                where = f"{path} line {table.line_num}"
                if len(cells) <= len(names):
                    values = [cell or None for cell in cells]
                    values += [None] * (len(names) - len(cells))
                    yield Row(where=where, fields=dict(zip(names, values, strict=True)))
                    continue
                error = TaskError(
                    f"{where}: has {len(cells)} cells, and the first line names {len(names)} "
                    'fields: put cells that hold a comma in quotes, "...".'
                )
                if on_bad is None:
                    raise error
                on_bad(error)
    except csv.Error as error:
        raise TaskError(
            f"{path} is not CSV: the row that ends in line {table.line_num}: {error}. Check its "
            'quotes: a quote inside a quoted cell is written twice, "".'
        ) from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 ({error.reason}): save it as UTF-8.") from None
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}.") from error


def _require_distinct(names: list[str], path: Path) -> None:
    repeated = [name for place, name in enumerate(names) if name in names[:place]]
    if repeated:
        raise TaskError(f"{path} line 1: names the field {repeated[0]!r} twice: rename one.")


_EXAMPLE = '[{"prompt": "2+2=", "answer": "4"}, ...]'


def read_json(
    path: Path, *, key: str = "", on_bad: Callable[[TaskError], None] | None = None
) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list of objects, such a list under a key, or columns.

        [{"prompt": "2+2=", "answer": "4"}, ...]
        {"version": 2, "data": [{"prompt": "2+2=", "answer": "4"}, ...]}     the only list
        {"dev": [{...}, ...], "test": [{...}, ...]}                          key: test
        {"prompt": ["2+2=", ...], "answer": ["4", ...]}                      columns

    If the file holds several lists, `key` names one; `data.test` is a list inside an object. JSON
    lines in a .json file are read as JSON lines. An item that is not an object is skipped and
    passed to `on_bad`; without `on_bad` it raises.
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
    """Parse the document; None if the file holds JSON lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return json.loads(text, parse_constant=refuse_constant)
    except FileNotFoundError:
        raise TaskError(f"There is no file {path}.{near_path(path)}") from None
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
    """Return the dotted name of the list that holds the rows, and the list."""
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
    """Return the lists of objects in an object and one level below, by dotted name."""
    lists: dict[str, list[Any]] = {}
    for name, value in document.items():
        if _is_rows(value):
            lists[f"{prefix}{name}"] = value
        elif isinstance(value, dict) and prefix.count(".") < 1:
            lists |= _lists(value, f"{prefix}{name}.")
    return lists


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


LOCAL_FORMATS = (".csv", ".json", ".jsonl", ".parquet")
"""Suffixes of files that can be a dataset."""


def read_dataset(
    dataset: str,
    *,
    subset: str = "",
    split: str = "train",
    key: str = "",
    on_bad: Callable[[TaskError], None] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a Hugging Face dataset: from the hub, or a local file or folder.

        read_dataset("openai/gsm8k", subset="main", split="test")
        read_dataset("claims.csv")
        read_dataset("mmlu.json", key="test")

    A single file has only the split `train`. .csv, .json and .jsonl files need no package and pass
    lines that are not a row to `on_bad`; the package `datasets` reads everything else.
    """
    path = expanded(dataset)
    if key and not (path.is_file() and path.suffix == ".json"):
        raise TaskError(
            f"key is {key!r}, which names the list of rows in a .json file, and {dataset} is not "
            "one: leave key out. A dataset's own split is named by split."
        )
    if not path.is_file() or path.suffix not in (".csv", ".json", ".jsonl"):
        return _read_with_datasets(dataset, path, subset=subset, split=split)
    if split != "train":
        raise TaskError(
            f"split is {split!r}, and the file {path} has none: leave split out. The list of rows "
            "in a .json file is named by key."
        )
    if path.suffix == ".csv":
        return read_csv(path, on_bad=on_bad)
    if path.suffix == ".jsonl":
        return read_jsonl(path, on_bad=on_bad)
    return read_json(path, key=key, on_bad=on_bad)


def _read_with_datasets(dataset: str, path: Path, *, subset: str, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"Reading a dataset needs the package datasets: {install_extra('hf')}. "
            "Files of CSV, JSON and JSON lines need nothing."
        ) from error
    if path.is_file() and path.suffix not in LOCAL_FORMATS:
        raise TaskError(f"{path} is none of {', '.join(LOCAL_FORMATS)}: convert it to one of them.")
    with boundary(
        TaskError,
        f"Reading the split {split!r} of the dataset {dataset}",
        remedy={
            ConnectionError: "The hub was not reached: check the network, or give a local file",
            FileNotFoundError: "Check the id, the access, or give the path of a local file",
        },
    ):
        try:
            if path.is_file():
                rows = datasets.load_dataset(path.suffix[1:], data_files=str(path), split=split)
            elif (path / "dataset_info.json").is_file():
                rows = datasets.load_from_disk(str(path))
            elif (path / "dataset_dict.json").is_file():
                rows = datasets.load_from_disk(str(path))[split]
            else:
                rows = datasets.load_dataset(str(dataset), name=subset or None, split=split)
        except datasets.exceptions.DatasetGenerationError as error:
            # The error's own message says only that an error occurred.
            raise error.__cause__ or error from None
    for number, fields in enumerate(rows, start=1):
        yield Row(where=f"{dataset} [{split}] row {number}", fields=fields)
