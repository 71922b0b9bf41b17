"""Your own function: the reward is what it returns for (task, completion).

    {type: python, function: 'my_rewards.py:politeness'}
    {type: python, function: 'my_package.rewards:politeness'}

    def politeness(task: Task, completion: Completion) -> float: ...

A plain function runs in a thread of its own, one call at a time, so that it may be slow and need
not be thread-safe; an `async def` runs in the event loop, many calls at once. A call that takes
longer than `timeout_s` has failed. A thread cannot be stopped: the next call gets a new one.
"""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from numbers import Real
from queue import SimpleQueue
from typing import Literal, TypeVar

from pydantic import Field

from rookery.errors import TaskError, boundary
from rookery.tasks.python_function import (
    LARGEST,
    FunctionName,
    exits_as_errors,
    find_function,
    finite_number,
    shown,
)
from rookery.tasks.scorers.text import ScorerOptions
from rookery.types import Completion, Task

__all__ = ["PythonConfig", "PythonScorer"]

Verdict = Real | Awaitable[Real]
Result = TypeVar("Result")


class PythonConfig(ScorerOptions):
    """The function decides alone: references are not checked."""

    type: Literal["python"] = "python"
    function: FunctionName
    """`path/to/file.py:function`, or `package.module:function` of what is installed."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """A call that takes longer is an error of that answer. An `async def` that lets its calls wait
    for one another has their waiting counted."""


class PythonScorer:
    """Calls the function and insists on a finite number."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: PythonConfig) -> None:
        self._name = config.function
        self._function: Callable[[Task, Completion], Verdict] = find_function(
            config.function, what="scorer"
        )
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._timeout_s = config.timeout_s
        self._thread = _CallThread()
        # Held by the call that the thread makes; the limit of the next begins when it gets it.
        self._turn = asyncio.Lock()

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
                verdict = await self._in_thread(task, completion, name)
            value = await self._limited(verdict, name) if inspect.isawaitable(verdict) else verdict
        number = finite_number(value)
        if number is None:
            raise TaskError(
                f"{name} returned {shown(value)}; return a finite number up to {LARGEST:g} or a "
                "bool."
            )
        return number

    async def _in_thread(self, task: Task, completion: Completion, name: str) -> Verdict:
        async with self._turn:
            call = self._thread.submit(lambda: self._call(task, completion))
            try:
                return await self._limited(asyncio.wrap_future(call), name)
            finally:
                if not call.done():
                    self._thread = _CallThread()

    async def _limited(self, work: Awaitable[Result], name: str) -> Result:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():  # one of the function's own
                raise
            raise TaskError(
                f"{name} took longer than {self._timeout_s:g} s: make it faster, or raise "
                "scorer.timeout_s."
            ) from None


class _CallThread:
    """Makes one call after another in a thread that does not hold up the end of the program: one
    call may never return. The thread ends with this object and its last call."""

    def __init__(self) -> None:
        # Filled by `submit`, drained by the thread; None ends it.
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(
            target=_make_calls, args=(self._calls,), name="python-scorer", daemon=True
        ).start()

    def submit(self, function: Callable[[], Verdict]) -> "Future[Verdict]":
        future: Future[Verdict] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 (whoever waits gets it, exit() too)
                future.set_exception(error)

        self._calls.put(call)
        return future


def _make_calls(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
