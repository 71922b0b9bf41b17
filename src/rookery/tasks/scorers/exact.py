"""Exact match: 1 when the completion's text is the reference, after the chosen normalisation."""

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

from rookery.tasks.scorers.options import ScorerOptions, reference_texts, require_judgeable
from rookery.types import Completion, Task

__all__ = ["ExactConfig", "ExactScorer", "normalize_text"]

NUMBER_PUNCTUATION = frozenset("-.,/:")
"""Kept before a digit: without them 3.5 would equal 35, 1/2 would equal 12 and -3 would equal 3."""


class ExactConfig(ScorerOptions):
    """The text must equal the reference, or one of them when the reference is a list."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Ignore whitespace at both ends and count any run of it inside as one space."""
    ignore_case: bool = False
    """Compare case-folded: Straße equals STRASSE."""
    ignore_punctuation: bool = False
    """Drop punctuation, but for `-.,/:` directly before a digit: `"Paris".` equals Paris, and
    3.5 does not equal 35."""

    def complaint(self, task: Task) -> str:
        texts = reference_texts(task.reference)
        if not texts:
            return f"exact needs a text, a number or a list of them as reference, got {_kind(task)}"
        if not all(normalize_text(text, config=self) for text in texts):
            return (
                f"exact got the reference {task.reference!r}, of which nothing is left to compare: "
                "any empty completion would be right. Give a reference with text"
            )
        return ""


class ExactScorer:
    """Whole text against whole text."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    def read(self, completion: Completion) -> str | None:
        return normalize_text(completion.text, config=self._config) or None

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        answer = normalize_text(completion.text, config=self._config)
        wanted = {normalize_text(t, config=self._config) for t in reference_texts(task.reference)}
        return float(answer in wanted)


def normalize_text(text: str, *, config: ExactConfig) -> str:
    """The text as it is compared; always in Unicode's composed form."""
    text = unicodedata.normalize("NFC", text)
    if config.ignore_punctuation:
        text = "".join(c for c, after in _pairs(text) if not _is_dropped(c, after))
    if config.ignore_case:
        text = text.casefold()
    if config.strip or config.ignore_punctuation:
        text = re.sub(r"\s+", " ", text).strip()
    return text


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    return zip(text, text[1:] + " ", strict=True)


def _is_dropped(char: str, after: str) -> bool:
    if char in NUMBER_PUNCTUATION and after.isdigit():
        return False
    return unicodedata.category(char).startswith("P")


def _kind(task: Task) -> str:
    return "none" if task.reference is None else type(task.reference).__name__
