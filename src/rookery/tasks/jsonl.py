"""JSON lines: one object per line, every error with its line number."""

import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rookery.errors import TaskError
from rookery.tasks.rows import Row, require_plain

__all__ = ["near_name", "read_jsonl", "refuse_constant"]


def read_jsonl(path: Path, *, on_bad: Callable[[TaskError], None] | None = None) -> Iterator[Row]:
    """The rows of a file; blank lines are skipped and counted.

    A line that is not a JSON object is handed to `on_bad` and left out; without one it is raised.
    """
    if path.is_dir():
        raise TaskError(f"{path} is a folder; give a file of JSON lines.")
    try:
        # By bytes: text mode would also split lines at \u2028 inside a JSON string.
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
        raise TaskError(f"There is no file {path}.{near_name(path)}") from None
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}.") from error


def near_name(path: Path) -> str:
    """ " Did you mean ...?" when the folder has a file of a similar name, else ""."""
    folder = path.parent
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {folder / near[0]}?" if near else ""


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
    """For `parse_constant`: NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not a JSON value; write null or a number")


def _shown(line: bytes) -> str:
    text = line.decode().strip()
    return text if len(text) <= 60 else text[:57] + "..."
