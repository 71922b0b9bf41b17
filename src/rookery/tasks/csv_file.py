"""A CSV file as rows: the first line names the fields, every cell is text, an empty one is null.

prompt,answer
2+2=,4
"""

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rookery.errors import TaskError
from rookery.tasks.rows import Row

__all__ = ["read_csv"]


def read_csv(path: Path, *, on_bad: Callable[[TaskError], None] | None = None) -> Iterator[Row]:
    """The rows of a file; blank lines are skipped, cells missing at the end of a line are null.

    A row of more cells than names is handed to `on_bad` and left out; without one it is raised.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Strict: a quote that is never closed would otherwise swallow the rest of the file.
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
