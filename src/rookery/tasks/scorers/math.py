"""Mathematics: 1 when math-verify shows the completion's answer equal to the reference.

The check runs in a process of its own (math_worker.py): an answer such as 9^(9^(9^9)) would block
the interpreter, and math-verify's own time limits work in the main thread only and not inside one
long multiplication. The process is started at the first reward and killed when it is late.
"""

import asyncio
import json
import re
import select
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from rookery.errors import TaskError
from rookery.tasks.scorers.numeric import find_answer
from rookery.tasks.scorers.options import ScorerOptions, reference_texts, require_judgeable
from rookery.types import Completion, Task

__all__ = ["MathConfig", "MathScorer"]

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
                "The math scorer needs the package math-verify: pip install 'rookery[tasks]'."
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
