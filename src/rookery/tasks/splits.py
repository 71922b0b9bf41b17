"""Assigns tasks to the disjoint splits search, select and report, reproducibly.

A hash of a task's question decides its split. The question is the group if rows have groups, else
the prompt; case, spacing and Unicode form are ignored. Other rows, row order, ids and the taskset's
name have no influence: adding rows moves none, and a question that occurs twice is in one split.

    split_of(split_key("2+2="), SplitsConfig()) -> "report"

Tasksets with different fractions may place a question differently. Within a run, `latest_splits`
moves a shared question to the latest of its splits; the order is search, select, report.
"""

import hashlib
import math
import unicodedata
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.types import Message, Task

__all__ = [
    "SPLITS",
    "SplitName",
    "SplitsConfig",
    "content_key",
    "hash_fraction",
    "join_keys",
    "latest_splits",
    "question_of",
    "split_key",
    "split_of",
]

SplitName = Literal["search", "select", "report"]
SPLITS: tuple[SplitName, ...] = ("search", "select", "report")


class SplitsConfig(Config):
    """Fraction of a taskset in each split; the three sum to 1."""

    search: float = Field(default=0.5, ge=0.0, le=1.0)
    """Fraction of tasks that a loop may read at any time."""
    select: float = Field(default=0.2, ge=0.0, le=1.0)
    """Fraction of tasks for choosing among the candidates of the search."""
    report: float = Field(default=0.3, ge=0.0, le=1.0)
    """Fraction of tasks that are read once, at the end."""
    salt: str = "rookery"
    """A different salt gives a different assignment, to repeat an experiment."""
    hidden: tuple[SplitName, ...] = ()
    """Splits whose tasks are left out because another run uses them. Example: `report`, if another
    run measures the result of this search."""

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        total = self.search + self.select + self.report
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"splits sum to {total:g}; search + select + report must be 1: "
                "write for example search: 0.5, select: 0.2, report: 0.3"
            )
        return self

    def fraction(self, name: SplitName) -> float:
        """Fraction of all rows that is available in a split; 0 if the split is hidden."""
        return 0.0 if name in self.hidden else self.share(name)

    def share(self, name: SplitName) -> float:
        """Fraction of all rows that belongs to a split, hidden or not."""
        return {"search": self.search, "select": self.select, "report": self.report}[name]


def split_key(prompt: str | tuple[Message, ...]) -> str:
    """Return the prompt's normalised words. A text and a single message with it have equal keys."""
    texts = (prompt,) if isinstance(prompt, str) else tuple(m.content for m in prompt)
    return "\n".join(_same_words(text) for text in texts)


def content_key(task: Task) -> str:
    """Return a key that is equal for tasks with equal prompts and equal sets of choices."""
    return "\n".join([split_key(task.prompt), *sorted(map(_same_words, task.choices))])


def question_of(task: Task) -> str:
    """Return the key of a task's question. Its tasks share a split and are one cluster."""
    return task.group or split_key(task.prompt)


def split_of(key: str, splits: SplitsConfig) -> SplitName:
    """Return the split of a key, from the position of its hash in [0, 1)."""
    place = hash_fraction(key, salt=f"split/{splits.salt}")
    used = [name for name in SPLITS if splits.share(name) > 0.0]
    end = 0.0
    for name in used[:-1]:
        end += splits.share(name)
        if place < end:
            return name
    return used[-1]


def latest_splits(keys: Sequence[Sequence[str]], splits: Sequence[SplitName]) -> list[SplitName]:
    """Give tasks that share a key, directly or through other tasks, the latest of their splits.

    latest_splits([("a",), ("a", "b"), ("b",), ("c",)], ["search", "report", "select", "search"])
        -> ["report", "report", "report", "search"]
    """
    roots = join_keys(keys)
    latest: dict[str, SplitName] = {}
    for place, split in zip(roots, splits, strict=True):
        latest[place] = max(latest.get(place, split), split, key=SPLITS.index)
    return [latest[place] for place in roots]


def join_keys(keys: Sequence[Sequence[str]]) -> list[str]:
    """Return one representative key per item; items that share keys, even indirectly, get the same.

    join_keys([("a",), ("a", "b"), ("b",), ("c",)]) -> ["a", "a", "a", "c"]
    """
    parent = {key: key for item_keys in keys for key in item_keys}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for first, *others in keys:
        for other in others:
            parent[root(other)] = root(first)
    return [root(item_keys[0]) for item_keys in keys]


def hash_fraction(text: str, *, salt: str) -> float:
    """Hash a text and a salt to a number in [0, 1)."""
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), key=hashlib.blake2b(salt.encode()).digest()
    ).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _same_words(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
