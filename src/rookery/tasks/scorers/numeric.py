r"""Numeric and math scorers: 1 if the completion's answer equals the reference.

The numeric answer is the number after the last `####`, or else the last number of the text. Values
are exact fractions: 0.1 is one tenth, and float rounding never decides a reward.

    #### 72 | $1,000 = 1,000.00 = 1000 | −3 | 50% = 50 | 1/2 = 0.5 = \frac{1}{2} | 1 1/2 | 1e3

Units are ignored, including currency and percent signs: 50% is 50, not 0.5. Digits directly after a
letter (H2O, x2) or ^ (m^2) are not a number; digits directly before letters (72kg) are.
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
"""Longest number that counts as an answer; Python refuses to parse more than 4300 digits."""
MAX_EXPONENT = 400
"""Largest exponent: 1e999999999 as a fraction would exhaust memory."""

VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
GROUP_MARKS = ",\u00a0\u2009\u202f"
"""Separators between groups of three digits: a comma or a narrow or non-breaking space."""

_DIGITS = rf"(?:\d{{1,3}}(?:[{GROUP_MARKS}]\d{{3}})+(?!\d)|\d+)"
# ASCII, so that only Latin letters join with a number: one after a Chinese word still counts.
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
    """Largest accepted absolute difference from the reference."""
    rel_tolerance: float = Field(default=0.0, ge=0.0)
    """Largest accepted difference as a fraction of the reference: 0.01 is one percent. The larger
    of the two tolerances applies."""

    def complaint(self, task: Task) -> str:
        texts = reference_texts(task.reference)
        if texts and all(find_answer(text) is not None for text in texts):
            return ""
        return "numeric needs a number in the reference, such as 72 or '#### 72', got " + (
            "none" if task.reference is None else repr(task.reference)
        )


class NumericScorer:
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
        # Convert through str, so that a tolerance of 0.1 is exactly one tenth.
        absolute = Fraction(str(self._config.abs_tolerance))
        relative = Fraction(str(self._config.rel_tolerance)) * abs(wanted)
        return abs(answer - wanted) <= max(absolute, relative)


def find_answer(text: str) -> Fraction | None:
    """Return a text's numeric answer; None if there is none or it is undefined (1/0)."""
    text = _plain(text)
    marked = [_NUMBER.match(text, marker.end()) for marker in _MARKER.finditer(text)]
    numbers = [match for match in marked if match is not None] or list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    """Replace typographic and LaTeX spellings of numbers by plain ones: 1½ -> 1 1/2."""
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


# The math scorer lets math-verify compare the answer with the reference in a separate process
# (math_worker.py). An answer such as 9^(9^(9^9)) would block the interpreter, and math-verify's own
# time limits work only in the main thread and cannot interrupt a long multiplication. The process
# is started at the first reward and killed when a check exceeds its time limit.


_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")

START_LIMIT_S = 120.0
"""Ends a start that hangs. Importing sympy takes about 1 s on an idle machine."""


class MathConfig(ScorerOptions):
    r"""The reference is LaTeX or plain mathematics: `\frac{1}{2}`, `x^2 + 1`, `#### 72`."""

    type: Literal["math"] = "math"
    timeout_s: float = Field(default=10.0, gt=0.0)
    """Time limit of one comparison. Exceeding it is an error of that task, not a wrong answer."""

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
        # One thread waits for the process; further checks queue for the thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="math-scorer")

    @property
    def process_id(self) -> int | None:
        """Id of the worker process; None before the first answer and after a failed one."""
        return self._worker.process_id

    def read(self, completion: Completion) -> str | None:
        """Return the last boxed formula as written, or else the last number, or else the text."""
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
    """One child process that answers each line with one line. Not thread-safe."""

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
        # -P keeps this folder off sys.path, where its files could shadow installed packages.
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
    """Read one line; b"" if the process has ended, None if the time limit has passed."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
