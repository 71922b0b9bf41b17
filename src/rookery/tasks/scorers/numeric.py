r"""Numbers and mathematics: 1 when the completion's answer equals the reference.

The answer is the number after the last `####`, or else the last number of the text. Values are
compared as exact fractions, so 0.1 is one tenth and no float rounding decides a reward.

    #### 72 | $1,000 = 1,000.00 = 1000 | −3 | 50% = 50 | 1/2 = 0.5 = \frac{1}{2} | 1 1/2 | 1e3

A currency or percent sign is a unit, and units are not compared: 50% is 50, not 0.5. A number
glued to letters before it (H2O, x2) or to ^ (m^2) is none; one before letters (72kg) is one.
"""

import asyncio
import json
import re
import select
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from rookery.errors import TaskError, install_extra
from rookery.tasks.scorers.text import ScorerOptions, reference_texts, require_judgeable
from rookery.types import Completion, Task

__all__ = ["MathConfig", "MathScorer", "NumericConfig", "NumericScorer", "find_answer"]


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


# Mathematics: 1 when math-verify shows the completion's answer equal to the reference.
#
# The check runs in a process of its own (math_worker.py): an answer such as 9^(9^(9^9)) would block
# the interpreter, and math-verify's own time limits work in the main thread only and not inside one
# long multiplication. The process is started at the first reward and killed when it is late.


_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")

START_LIMIT_S = 120.0
"""Importing sympy takes a second on an idle machine; this only ends a start that hangs."""


class MathConfig(ScorerOptions):
    r"""The reference is LaTeX or plain mathematics: `\frac{1}{2}`, `x^2 + 1`, `#### 72`."""

    type: Literal["math"] = "math"
    timeout_s: float = Field(default=10.0, gt=0.0)
    """A check that takes longer is an error of that task, not a wrong answer."""

    def complaint(self, task: Task) -> str:
        texts = reference_texts(task.reference)
        if texts and all(text.strip() for text in texts):
            return ""
        return f"math needs a formula or a number as reference, got {task.reference!r}"


class MathScorer:
    """Compares by computer algebra: 0.5 equals 1/2, (x+1)^2 equals x^2+2x+1."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: MathConfig) -> None:
        if find_spec("math_verify") is None:
            raise TaskError(
                f"The math scorer needs the package math-verify: {install_extra('tasks')}."
            )
        self._config = config
        self._worker = _Worker()
        # One thread: it waits for the process, and the next check waits for it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="math-scorer")

    @property
    def process_id(self) -> int | None:
        """The process that compares; None before the first answer and after one that failed."""
        return self._worker.process_id

    def read(self, completion: Completion) -> str | None:
        """The last boxed formula, else the last number, as it is written: 1/2 and 0.5 are two."""
        boxed = _BOXED.findall(completion.text)
        if boxed:
            return "".join(boxed[-1].split()) or None
        number = find_answer(completion.text)
        return completion.text.strip() or None if number is None else str(number)

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        request = {"references": reference_texts(task.reference), "answer": completion.text}
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(
            self._thread, self._worker.ask, json.dumps(request), self._config.timeout_s
        )
        if "error" in reply:
            raise TaskError(f"Task {task.id}: {reply['error']}")
        return float(reply["equal"])


class _Worker:
    """One child process that answers a line with a line. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, request: str, limit_s: float) -> dict[str, str | bool]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode() + b"\n")
            line = _read_line(process, limit_s=limit_s)
        except BrokenPipeError:
            line = b""
        if line:
            reply: dict[str, str | bool] = json.loads(line)
            return reply
        self._process = None
        _stop(process)
        if line is None:
            return {
                "error": f"comparing the answer with the reference took more than {limit_s:g} s. "
                "Raise scorer.timeout_s if the reference is that hard."
            }
        return {"error": f"the math process died with exit code {process.returncode}."}

    def _start(self) -> subprocess.Popen[bytes]:
        # -P keeps this folder off sys.path, where regex.py would stand in for the package regex.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        weakref.finalize(self, _stop, process)
        if not _read_line(process, limit_s=START_LIMIT_S):
            _stop(process)
            raise TaskError(f"The math process did not start (exit code {process.returncode}).")
        self._process = process
        return process


def _read_line(process: subprocess.Popen[bytes], *, limit_s: float) -> bytes | None:
    """One line, b"" when the process has ended, None when the limit has passed."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
