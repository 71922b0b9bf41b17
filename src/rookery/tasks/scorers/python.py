"""Python scorer: the reward is the return value of your function of (task, completion).

    {type: python, function: 'my_rewards.py:politeness'}
    {type: python, function: 'my_package.rewards:politeness'}

    def politeness(task: Task, completion: Completion) -> float: ...

A plain function runs in its own thread, one call at a time: it may be slow and need not be
thread-safe. An `async def` runs in the event loop, many calls at once. A call fails if it takes
longer than `timeout_s`. Its thread cannot be stopped, so the next call gets a new one.
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
    """The function decides the reward; references are not checked."""

    type: Literal["python"] = "python"
    function: FunctionName
    """`path/to/file.py:function`, or `package.module:function` of an installed package."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Time limit of one call; exceeding it is an error of that answer. For an `async def` the limit
    includes the time its calls wait for one another."""


class PythonScorer:
    """Calls the function; TaskError unless it returns a finite number."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: PythonConfig) -> None:
        self._name = config.function
        self._function: Callable[[Task, Completion], Verdict] = find_function(
            config.function, what="scorer"
        )
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._timeout_s = config.timeout_s
        self._thread = _CallThread()
        # Held during a call in the thread. The next call's time limit starts when it gets the lock.
        self._turn = asyncio.Lock()

    def read(self, completion: Completion) -> str | None:
        return completion.text.strip() or None

    def _call(self, task: Task, completion: Completion) -> Verdict:
        try:
            return self._function(task, completion)
        except StopIteration as error:  # a future cannot hold it: the caller would wait forever
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
            if not limit.expired():  # raised by the function itself
                raise
            raise TaskError(
                f"{name} took longer than {self._timeout_s:g} s: make it faster, or raise "
                "scorer.timeout_s."
            ) from None


class _CallThread:
    """A daemon thread that makes one call after another. A call that never returns does not delay
    the program's exit. The thread ends after its last call once this object is deleted."""

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
            except BaseException as error:  # noqa: BLE001 (re-raised in the caller, exit() too)
                future.set_exception(error)

        self._calls.put(call)
        return future


def _make_calls(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
