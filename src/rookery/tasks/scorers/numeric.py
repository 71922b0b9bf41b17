r"""Numbers: 1 when the completion's answer equals the reference as a number.

The answer is the number after the last `####`, or else the last number of the text. Values are
compared as exact fractions, so 0.1 is one tenth and no float rounding decides a reward.

    #### 72 | $1,000 = 1,000.00 = 1000 | −3 | 50% = 50 | 1/2 = 0.5 = \frac{1}{2} | 1 1/2 | 1e3

A currency or percent sign is a unit, and units are not compared: 50% is 50, not 0.5. A number
glued to letters before it (H2O, x2) or to ^ (m^2) is none; one before letters (72kg) is one.
"""

import re
from fractions import Fraction
from typing import Literal

from pydantic import Field

from rookery.tasks.scorers.options import ScorerOptions, reference_texts, require_judgeable
from rookery.types import Completion, Task

__all__ = ["NumericConfig", "NumericScorer", "find_answer"]

MAX_DIGITS = 400
"""A longer number is no answer to anything; Python refuses to parse one of 4300 digits."""
MAX_EXPONENT = 400
"""1e999999999 would fill the memory with zeros."""

VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
GROUP_MARKS = ",\u00a0\u2009\u202f"
"""What may stand between groups of three digits: a comma or a space that does not break."""

_DIGITS = rf"(?:\d{{1,3}}(?:[{GROUP_MARKS}]\d{{3}})+(?!\d)|\d+)"
# ASCII, so that only Latin letters glue to a number: a Chinese word before one does not hide it.
_NUMBER = re.compile(
    rf"""(?<![\w.^])
    (?P<sign>(?:(?<![)\]}}])[+-])?)(?:\\?[$€£¥]\s?(?P<inner_sign>[+-]?))?
    (?:
        (?P<whole>{_DIGITS})[ ](?P<above>\d+)/(?P<below>\d+)(?!\d|/\d|\.\d)
      | (?<!/)(?P<numerator>{_DIGITS})\s?/\s?(?P<denominator>{_DIGITS})(?!\d|/\d|\.\d)
      | (?P<decimal>{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d+))?
    )""",
    re.VERBOSE | re.ASCII,
)
_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|([" + "".join(VULGAR) + "])"
)
_MARKER = re.compile(r"(?<!#)####(?!#)[\s*({:]*(?:\\[(\[])?\s*")


class NumericConfig(ScorerOptions):
    """The completion's number must equal the reference, exactly unless a tolerance is given."""

    type: Literal["numeric"] = "numeric"
    abs_tolerance: float = Field(default=0.0, ge=0.0)
    """How far off the answer may be, in the reference's unit."""
    rel_tolerance: float = Field(default=0.0, ge=0.0)
    """How far off it may be as a part of the reference: 0.01 is one percent. The larger counts."""

    def complaint(self, task: Task) -> str:
        texts = reference_texts(task.reference)
        if texts and all(find_answer(text) is not None for text in texts):
            return ""
        return "numeric needs a number in the reference, such as 72 or '#### 72', got " + (
            "none" if task.reference is None else repr(task.reference)
        )


class NumericScorer:
    """The one number that the text ends in, against the reference."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: NumericConfig) -> None:
        self._config = config

    def read(self, completion: Completion) -> str | None:
        answer = find_answer(completion.text)
        return None if answer is None else str(answer)

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        answer = find_answer(completion.text)
        if answer is None:
            return 0.0
        wanted = (find_answer(text) for text in reference_texts(task.reference))
        return float(any(value is not None and self._is_close(answer, value) for value in wanted))

    def _is_close(self, answer: Fraction, wanted: Fraction) -> bool:
        # By way of str, so that a tolerance of 0.1 is one tenth and not the nearest float.
        absolute = Fraction(str(self._config.abs_tolerance))
        relative = Fraction(str(self._config.rel_tolerance)) * abs(wanted)
        return abs(answer - wanted) <= max(absolute, relative)


def find_answer(text: str) -> Fraction | None:
    """The number a text answers with; None when it has none, or one that is no value (1/0)."""
    text = _plain(text)
    marked = [_NUMBER.match(text, marker.end()) for marker in _MARKER.finditer(text)]
    numbers = [match for match in marked if match is not None] or list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    """Typographic and LaTeX spellings of a number as plain ones: 1½ -> 1 1/2."""
    text = text.replace("\u2212", "-").replace("\u2044", "/").replace("{,}", ",")
    return _FRACTION.sub(_spell_fraction, text.replace("\\!", ""))


def _spell_fraction(match: re.Match[str]) -> str:
    spelled = VULGAR[match[3]] if match[3] else f"{match[1]}/{match[2]}"
    before = match.string[match.start() - 1 : match.start()]
    return f" {spelled}" if before.isalnum() else spelled


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    group = {
        name: re.sub(f"[{GROUP_MARKS}]", "", text) for name, text in match.groupdict("").items()
    }
    exponent = int(group["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    try:
        if group["whole"]:
            part = Fraction(int(group["above"]), int(group["below"]))
            size = int(group["whole"]) + part if part < 1 else part
        elif group["numerator"]:
            size = Fraction(int(group["numerator"]), int(group["denominator"]))
        else:
            size = Fraction(group["decimal"]) * Fraction(10) ** exponent
    except ZeroDivisionError:
        return None
    return -size if "-" in (group["sign"], group["inner_sign"]) else size
