"""Rows -> the tasks of a taskset: ids that differ, one group per content, bad rows counted.

bad = BadRows()
read = read_tasks(
    rows, fields=FieldsConfig(), prompt_template="", source="gsm8k", bad=bad,
    complaint=ExactConfig().complaint,
)
skipped = bad.settle("skip", num_good=len(read))
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rookery.errors import TaskError
from rookery.tasks.rows import FieldsConfig, Row, RowReader
from rookery.tasks.splits import content_key
from rookery.types import Task

__all__ = ["BadRows", "BadRowsPolicy", "ReadTask", "SkippedRows", "read_tasks"]

BadRowsPolicy = Literal["refuse", "skip"]

NUM_EXAMPLES = 3
"""Sentences about bad rows that are kept: enough to see a pattern, few enough to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """A task and its place: "data.jsonl line 17"."""

    task: Task
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRows:
    """The rows that were left out: how many of how many, and what is wrong with the first."""

    num_skipped: int = 0
    num_rows: int = 0
    examples: tuple[str, ...] = ()


class BadRows:
    """The rows that cannot be used, while a taskset is read."""

    def __init__(self) -> None:
        self._count = 0
        self._examples: list[str] = []

    def add(self, error: TaskError) -> None:
        """Count one row."""
        self._count += 1
        if len(self._examples) < NUM_EXAMPLES:
            self._examples.append(f"{str(error).rstrip('.')}.")

    def settle(self, policy: BadRowsPolicy, *, num_good: int) -> SkippedRows:
        """What was skipped; a TaskError when rows are refused, or none is left."""
        num_rows = self._count + num_good
        if self._count and not num_good:
            raise TaskError(
                f"{self._examples[0]} None of {num_rows:,} rows can be used: check which fields "
                "they have, fields and scorer."
            )
        if self._count and policy == "refuse":
            raise TaskError(
                f"{self._examples[0]} {self._count:,} of {num_rows:,} rows cannot be used: fix "
                "them, or leave them out with bad_rows: skip in the taskset's config "
                "(FILE?bad_rows=skip on the command line)."
            )
        return SkippedRows(
            num_skipped=self._count, num_rows=num_rows, examples=tuple(self._examples)
        )


def read_tasks(
    rows: Iterable[Row],
    *,
    fields: FieldsConfig,
    prompt_template: str,
    source: str,
    bad: BadRows,
    complaint: Callable[[Task], str],
) -> list[ReadTask]:
    """The tasks of all rows that fit; the others are added to `bad`.

    The first row that can be read, and of whose task there is no `complaint`, settles the fields.
    """
    settled: RowReader | None = None
    read: list[ReadTask] = []
    places: dict[str, str] = {}
    counts: Counter[str] = Counter()
    grouped: dict[str, tuple[str, str]] = {}
    for row in rows:
        try:
            reader = settled or RowReader(fields, prompt_template=prompt_template, first=row)
            task = reader.read(row, source=source)
            name = task.id
            if counts[name]:
                task = _renamed(task, row, counts[name], places, has_ids=reader.has_ids)
            if settled is None and (words := complaint(task)):
                raise TaskError(f"{row.where}: {words}")
            _require_one_group(grouped, task, row)
        except TaskError as error:
            bad.add(error)
            continue
        settled = reader
        counts[name] += 1
        places[task.id] = row.where
        read.append(ReadTask(task=task, where=row.where))
    return read


def _renamed(task: Task, row: Row, count: int, places: Mapping[str, str], *, has_ids: bool) -> Task:
    """A row that is there `count` times gets the next number; a given id twice is an error."""
    if has_ids:
        name = task.id.removeprefix(f"{task.source}/")
        raise TaskError(
            f"{row.where}: the id {name!r} is already that of {places[task.id]}. Ids must differ: "
            "fields: {id: null} makes them from the content."
        )
    return dataclasses.replace(task, id=f"{task.id}-{count + 1}")


def _require_one_group(grouped: dict[str, tuple[str, str]], task: Task, row: Row) -> None:
    before, where = grouped.setdefault(content_key(task), (task.group, row.where))
    if before != task.group:
        what = "prompt and choices" if task.choices else "prompt"
        raise TaskError(
            f"{row.where}: has the {what} of {where} and another group ({task.group}, there "
            f"{before}), and would be in two splits: give both rows one group."
        )
