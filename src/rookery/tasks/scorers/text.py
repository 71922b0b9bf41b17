"""Text scorers (exact match, regular expression, multiple choice), and the configs' base class.

A config's `complaint` checks tasks in advance, so that a bad reference stops the run at its line of
the file and not in the middle of a search.
"""

import re
import string
import unicodedata
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from rookery.config import Config
from rookery.errors import TaskError
from rookery.types import Completion, Json, Task

__all__ = [
    "ChoiceConfig",
    "ChoiceScorer",
    "ExactConfig",
    "ExactScorer",
    "RegexConfig",
    "RegexScorer",
    "ScorerOptions",
    "correct_choice",
    "reference_texts",
    "require_judgeable",
]


class ScorerOptions(Config):
    """Base class of the scorer configs."""

    def complaint(self, task: Task) -> str:  # noqa: ARG002 (subclasses use it)
        """Return why no completion of this task can be judged; "" if completions can be."""
        return ""


def require_judgeable(config: ScorerOptions, task: Task) -> None:
    """Raise a task's complaint, for tasks that `load_taskset` did not check."""
    complaint = config.complaint(task)
    if complaint:
        raise TaskError(f"Task {task.id}: {complaint}")


def reference_texts(reference: Json) -> tuple[str, ...]:
    """Return the texts that a reference accepts: itself, or each item of a list. Objects and null
    accept none.

    "4" -> ("4",); 4 -> ("4",); true -> ("true", "True"); ["4", "four"] -> ("4", "four")
    """
    if isinstance(reference, str):
        return (reference,)
    if isinstance(reference, bool):
        return (str(reference).lower(), str(reference))
    if isinstance(reference, int | float):
        return (str(reference),)
    if isinstance(reference, list):
        return tuple(text for item in reference for text in reference_texts(item))
    return ()


NUMBER_PUNCTUATION = frozenset("-.,/:")
"""Punctuation kept before a digit. Otherwise 3.5 would equal 35, 1/2 equal 12, and -3 equal 3."""


class ExactConfig(ScorerOptions):
    """The text must equal the reference, or one item of a reference that is a list."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Ignore whitespace at both ends, and treat any run of whitespace inside as one space."""
    ignore_case: bool = False
    """Compare case-folded: Straße equals STRASSE."""
    ignore_punctuation: bool = False
    """Drop punctuation except `-.,/:` directly before a digit: `"Paris".` equals Paris, but 3.5
    does not equal 35."""

    def complaint(self, task: Task) -> str:
        texts = reference_texts(task.reference)
        if not texts:
            return f"exact needs a text, a number or a list of them as reference, got {_kind(task)}"
        if not all(normalize_text(text, config=self) for text in texts):
            return (
                f"exact got the reference {task.reference!r}, and nothing is left to compare: "
                "any empty completion would be right. Give a reference with text"
            )
        return ""


class ExactScorer:
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
    """Normalise a text for comparison, always to Unicode's composed form (NFC)."""
    text = unicodedata.normalize("NFC", text)
    if config.ignore_punctuation:
        text = "".join(c for c, after in _pairs(text) if not _is_dropped(c, after))
    if config.ignore_case:
        text = text.casefold()
    if config.strip or config.ignore_punctuation:
        text = re.sub(r"\s+", " ", text).strip()
    return text


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each character with its successor; the last one's successor is a space."""
    return zip(text, f"{text[1:]} ", strict=False)  # an empty text has no pairs


def _is_dropped(char: str, after: str) -> bool:
    if char in NUMBER_PUNCTUATION and after.isdigit():
        return False
    return unicodedata.category(char).startswith("P")


def _kind(task: Task) -> str:
    return "none" if task.reference is None else type(task.reference).__name__


class RegexConfig(ScorerOptions):
    """`{type: regex, pattern: 'answer is (\\w+)', group: 1}`. Without `group` any match is enough
    and no reference is needed. The search has no time limit: nested repeats such as `(a+)+b` can
    take forever on a long completion."""

    type: Literal["regex"] = "regex"
    pattern: str
    """Python regular expression. Inline flags: (?i) ignores case, (?s) lets . match newlines."""
    group: int | str | None = None
    """Number or name of a group of the last match in the completion; 0 is the whole match. Its
    stripped text must equal the reference, or one item of it."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"the pattern {self.pattern!r} is not a regular expression: {error}"
            ) from None
        groups = {*range(compiled.groups + 1), *compiled.groupindex}
        if self.group is not None and self.group not in groups:
            allowed = ", ".join(sorted(map(str, groups)))
            raise ValueError(
                f"the pattern {self.pattern!r} has no group {self.group!r}; it has {allowed}"
            )
        return self

    def complaint(self, task: Task) -> str:
        if self.group is None or reference_texts(task.reference):
            return ""
        return f"regex compares group {self.group!r} with the reference, and there is none"


class RegexScorer:
    answer: Literal["sample"] = "sample"

    def __init__(self, config: RegexConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern)

    def read(self, completion: Completion) -> str | None:
        captured = [match.group(self._config.group or 0) for match in self._matches(completion)]
        return captured[-1].strip() if captured and captured[-1] is not None else None

    def _matches(self, completion: Completion) -> Iterator[re.Match[str]]:
        return self._pattern.finditer(completion.text)

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        group = self._config.group
        if group is None:
            return float(self._pattern.search(completion.text) is not None)
        captured = [match.group(group) for match in self._matches(completion)]
        if not captured or captured[-1] is None:
            return 0.0
        wanted = {text.strip() for text in reference_texts(task.reference)}
        return float(captured[-1].strip() in wanted)


class ChoiceConfig(ScorerOptions):
    """The model chooses by log-probability. The reference is a choice's text, its index from 0, or
    its letter from A. A reference that is one choice's text and another's letter is refused."""

    type: Literal["choice"] = "choice"
    normalize: Literal["sum", "mean"] = "sum"
    """How a choice's log-probability combines its tokens'. `sum` favours short choices; use `mean`,
    per token, for choices of very different lengths."""

    def complaint(self, task: Task) -> str:
        if len(task.choices) < 2:
            return f"choice needs at least two choices, got {len(task.choices)}"
        if len(set(task.choices)) < len(task.choices):
            return f"choice needs choices that differ, got {list(task.choices)}"
        named = _named_choices(task)
        if len(named) > 1:
            return (
                f"choice got the reference {task.reference!r}, which is the text of choice "
                f"{named[0]} and the letter of choice {named[1]} of {list(task.choices)}. Write "
                f"its index from 0 as a number ({named[0]} or {named[1]}), or give the choices "
                'with their letters, {"A": ..., "B": ...}, and the letter'
            )
        if not named:
            return (
                f"choice got the reference {task.reference!r}, which is none of {len(task.choices)}"
                f" choices {list(task.choices)}: write the text of one, its index from 0 as a "
                "number, or its letter from A"
            )
        return ""


class ChoiceScorer:
    """Compares a Completion whose text is the most likely of `task.choices` with the right one. The
    caller scores the choices and combines token log-probabilities as `normalize` says."""

    answer: Literal["choose"] = "choose"

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config

    def read(self, completion: Completion) -> str | None:
        return completion.text

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        if completion.text not in task.choices:
            raise TaskError(
                f"Task {task.id}: {completion.text!r} was chosen, which is none of the choices "
                f"{list(task.choices)}. A choice scorer judges the text of a choice as it is."
            )
        return float(completion.text == correct_choice(task))


def correct_choice(task: Task) -> str | None:
    """Return the text of the right choice; None if the reference names no choice, or two.

    A number is the index from 0. A text is the text of a choice or a letter from A; if it is both,
    for two choices, it is ambiguous: "B" of ("O", "A", "B", "AB"). A string of digits is only text,
    since some datasets count from 0 and some from 1.
    """
    named = _named_choices(task)
    return task.choices[named[0]] if len(named) == 1 else None


def _named_choices(task: Task) -> list[int]:
    """Return the indices of choices that the reference can mean: by text first, then by letter."""
    reference, choices = task.reference, task.choices
    if isinstance(reference, bool):
        word = str(reference).casefold()
        return [i for i, choice in enumerate(choices) if choice.casefold() == word][:1]
    if isinstance(reference, int):
        return [reference] if 0 <= reference < len(choices) else []
    if not isinstance(reference, str):
        return []
    word = reference.strip()
    named = [i for i, choice in enumerate(choices) if choice == reference]
    named = named or [i for i, choice in enumerate(choices) if choice.strip() == word]
    letter = string.ascii_uppercase.find(word) if len(word) == 1 else -1
    by_letter = [letter] if 0 <= letter < len(choices) else []
    return list(dict.fromkeys(named[:1] + by_letter))
