"""Multiple choice: the model chooses by log-probability, 1 when it chose the reference.

The caller scores every text of `task.choices` after the prompt, combines the log-probabilities of
its tokens as `normalize` says, and hands over a Completion whose text is the best choice.
"""

import string
from typing import Literal

from rookery.errors import TaskError
from rookery.tasks.scorers.options import ScorerOptions, require_judgeable
from rookery.types import Completion, Task

__all__ = ["ChoiceConfig", "ChoiceScorer", "correct_choice"]


class ChoiceConfig(ScorerOptions):
    """The reference is the text of one choice, its index from 0, or its letter from A; a text that
    is the text of one choice and the letter of another is refused."""

    type: Literal["choice"] = "choice"
    normalize: Literal["sum", "mean"] = "sum"
    """`sum`: the log-probability of the whole choice, which favours short ones. `mean`: per token,
    for choices of very different lengths."""

    def complaint(self, task: Task) -> str:
        if len(task.choices) < 2:
            return f"choice needs at least two choices, got {len(task.choices)}"
        if len(set(task.choices)) < len(task.choices):
            return f"choice needs choices that differ, got {list(task.choices)}"
        named = _named_choices(task)
        if len(named) > 1:
            return (
                f"choice got the reference {task.reference!r}, which is the text of choice "
                f"{named[0]} and the letter of choice {named[1]} of {list(task.choices)}: write "
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
    """Compares the chosen text with the right one."""

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
    """The text of the right choice, or None when the reference names none, or two.

    The reference is a number, the index from 0; or a text, the text of a choice or a letter from
    A. A text that is both, of two choices, is ambiguous: "B" of ("O", "A", "B", "AB"). A string of
    digits is text only, since some datasets count from 0 and some from 1.
    """
    named = _named_choices(task)
    return task.choices[named[0]] if len(named) == 1 else None


def _named_choices(task: Task) -> list[int]:
    """Places of the choices that the reference can mean: by its text first, then by its letter."""
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
