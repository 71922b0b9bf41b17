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
    """The reference is the text of one choice, its index from 0, or its letter from A."""

    type: Literal["choice"] = "choice"
    normalize: Literal["sum", "mean"] = "sum"
    """`sum`: the log-probability of the whole choice, which favours short ones. `mean`: per token,
    for choices of very different lengths."""

    def complaint(self, task: Task) -> str:
        if len(task.choices) < 2:
            return f"choice needs at least two choices, got {len(task.choices)}"
        if len(set(task.choices)) < len(task.choices):
            return f"choice needs choices that differ, got {list(task.choices)}"
        if correct_choice(task) is None:
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
        self.normalize: Literal["sum", "mean"] = config.normalize

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
    """The text of the right choice, or None when the reference names none.

    Text wins over letter: of the choices ("B", "A") the reference "A" is the second. A string of
    digits is text only, since some datasets count from 0 and some from 1.
    """
    reference, choices = task.reference, task.choices
    if isinstance(reference, bool):
        return next((c for c in choices if c.casefold() == str(reference).casefold()), None)
    if isinstance(reference, int):
        return choices[reference] if 0 <= reference < len(choices) else None
    if not isinstance(reference, str):
        return None
    for same in (str.__str__, str.strip):
        found = next((c for c in choices if same(c) == same(reference)), None)
        if found is not None:
            return found
    letter = string.ascii_uppercase.find(reference.strip()) if len(reference.strip()) == 1 else -1
    return choices[letter] if 0 <= letter < len(choices) else None
