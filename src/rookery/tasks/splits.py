"""Which tasks a search, a selection and a report may see: disjoint, and the same every time.

A task's split is a hash of its question: its group, where rows have groups, else its prompt. It
does not depend on the other rows, on their order, on ids or on the name of the taskset, so adding
rows moves none, and a question that is there twice, under two ids, is in one split only. Case,
spacing and Unicode form of prompts are ignored.

    split_of(split_key("2+2="), SplitsConfig()) -> "report"

Tasksets of unequal fractions place one question differently. Those of one run are settled together:
a question that several of them have is in the latest of its splits, and report is the latest.
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
    """How much of a taskset each split gets; the three sum to 1."""

    search: float = Field(default=0.5, ge=0.0, le=1.0)
    """Read as often as a loop likes."""
    select: float = Field(default=0.2, ge=0.0, le=1.0)
    """Read to choose among the candidates that were found."""
    report: float = Field(default=0.3, ge=0.0, le=1.0)
    """Read once, at the end."""
    salt: str = "rookery"
    """Another salt is another assignment, for repeating an experiment."""
    hidden: tuple[SplitName, ...] = ()
    """Splits whose tasks are left out, as they are another run's: `report` for a search whose
    result is measured elsewhere."""

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
        """Of all rows; 0 of a hidden split."""
        return 0.0 if name in self.hidden else self.share(name)

    def share(self, name: SplitName) -> float:
        """Of all rows, with those that are left out."""
        return {"search": self.search, "select": self.select, "report": self.report}[name]


def split_key(prompt: str | tuple[Message, ...]) -> str:
    """What decides the split: the prompt's words. A text equals the one message that holds it."""
    texts = (prompt,) if isinstance(prompt, str) else tuple(m.content for m in prompt)
    return "\n".join(_same_words(text) for text in texts)


def content_key(task: Task) -> str:
    """What two tasks have in common that ask the same: prompt and choices, in whatever order."""
    return "\n".join([split_key(task.prompt), *sorted(map(_same_words, task.choices))])


def question_of(task: Task) -> str:
    """Tasks of equal question are in one split, and in an interval they are not independent."""
    return task.group or split_key(task.prompt)


def split_of(key: str, splits: SplitsConfig) -> SplitName:
    """The split of a key, by where its hash falls in 0..1."""
    place = hash_fraction(key, salt=f"split/{splits.salt}")
    used = [name for name in SPLITS if splits.share(name) > 0.0]
    reached = 0.0
    for name in used[:-1]:
        reached += splits.share(name)
        if place < reached:
            return name
    return used[-1]


def latest_splits(keys: Sequence[Sequence[str]], splits: Sequence[SplitName]) -> list[SplitName]:
    """One split for tasks that share a key, directly or through others: the latest of theirs.

    latest_splits([("a",), ("a", "b"), ("b",), ("c",)], ["search", "report", "select", "search"])
        -> ["report", "report", "report", "search"]
    """
    roots = join_keys(keys)
    latest: dict[str, SplitName] = {}
    for place, split in zip(roots, splits, strict=True):
        latest[place] = max(latest.get(place, split), split, key=SPLITS.index)
    return [latest[place] for place in roots]


def join_keys(keys: Sequence[Sequence[str]]) -> list[str]:
    """One key for those that share a key, directly or through others.

    join_keys([("a",), ("a", "b"), ("b",), ("c",)]) -> ["a", "a", "a", "c"]
    """
    parent = {key: key for own_keys in keys for key in own_keys}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for first, *others in keys:
        for other in others:
            parent[root(other)] = root(first)
    return [root(own_keys[0]) for own_keys in keys]


def hash_fraction(text: str, *, salt: str) -> float:
    """A number in [0, 1) that the text and the salt determine."""
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), key=hashlib.blake2b(salt.encode()).digest()
    ).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _same_words(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
