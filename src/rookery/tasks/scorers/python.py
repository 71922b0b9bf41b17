"""Your own function: the reward is what it returns for (task, completion).

    {type: python, function: 'my_rewards.py:politeness'}
    {type: python, function: 'my_package.rewards:politeness'}

    def politeness(task: Task, completion: Completion) -> float: ...

A plain function runs in a thread of its own, one call at a time, so that it may be slow and need
not be thread-safe; an `async def` runs in the event loop, many calls at once.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Literal

from rookery.errors import TaskError, boundary
from rookery.tasks.python_function import (
    FunctionName,
    exits_as_errors,
    find_function,
    finite_number,
    shown,
)
from rookery.tasks.scorers.options import ScorerOptions
from rookery.types import Completion, Task

__all__ = ["PythonConfig", "PythonScorer"]

Verdict = Real | Awaitable[Real]


class PythonConfig(ScorerOptions):
    """The function decides alone: references are not checked."""

    type: Literal["python"] = "python"
    function: FunctionName
    """`path/to/file.py:function`, or `package.module:function` of what is installed."""


class PythonScorer:
    """Calls the function and insists on a finite number."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: PythonConfig) -> None:
        self._name = config.function
        self._function: Callable[[Task, Completion], Verdict] = find_function(
            config.function, what="scorer"
        )
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="python-scorer")

    def read(self, completion: Completion) -> str | None:
        return completion.text.strip() or None

    def _call(self, task: Task, completion: Completion) -> Verdict:
        try:
            return self._function(task, completion)
        except StopIteration as error:  # a future cannot hold it: the caller would wait without end
            raise TaskError(
                f"Task {task.id}: the scorer {self._name} raised StopIteration; give next() a "
                "default."
            ) from error

    async def reward(self, task: Task, completion: Completion) -> float:
        name = f"Task {task.id}: the scorer {self._name}"
        with boundary(TaskError, f"{name} failed"), exits_as_errors(name):
            if self._is_async:
                verdict = self._function(task, completion)
            else:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._thread, self._call, task, completion)
            value = await verdict if inspect.isawaitable(verdict) else verdict
        number = finite_number(value)
        if number is None:
            raise TaskError(f"{name} returned {shown(value)}; return a finite number or a bool.")
        return number
