r"""Regular expression: 1 when the pattern is found, or when what it captures is the reference.

    {type: regex, pattern: 'answer is (\w+)', group: 1}

The pattern is searched with Python's `re`, which has no time limit: nested repeats such as
`(a+)+b` can take forever on a long completion.
"""

import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from rookery.tasks.scorers.options import ScorerOptions, reference_texts, require_judgeable
from rookery.types import Completion, Task

__all__ = ["RegexConfig", "RegexScorer"]


class RegexConfig(ScorerOptions):
    """Without `group` a match anywhere is enough and no reference is needed."""

    type: Literal["regex"] = "regex"
    pattern: str
    """Python syntax; flags inline, such as (?i) to ignore case and (?s) to let . match newlines."""
    group: int | str | None = None
    """Number or name of the group whose text, stripped, must be the reference (or one of them).
    The last match in the completion counts. 0 is the whole match."""

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
    """Searches the completion's text."""

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
