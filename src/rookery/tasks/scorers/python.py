"""Your own function: the reward is what it returns for (task, completion).

    {type: python, function: 'my_rewards.py:politeness'}
    {type: python, function: 'my_package.rewards:politeness'}

    def politeness(task: Task, completion: Completion) -> float: ...

A plain function runs in a thread of its own, one call at a time, so that it may be slow and need
not be thread-safe; an `async def` runs in the event loop, many calls at once.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Literal

from pydantic import field_validator

from rookery.errors import TaskError, boundary
from rookery.tasks.scorers.options import ScorerOptions
from rookery.types import Completion, Task

__all__ = ["PythonConfig", "PythonScorer"]

Verdict = Real | Awaitable[Real]


class PythonConfig(ScorerOptions):
    """The function decides alone: references are not checked."""

    type: Literal["python"] = "python"
    function: str
    """`path/to/file.py:function`, or `package.module:function` of what is installed."""

    @field_validator("function")
    @classmethod
    def _has_two_parts(cls, value: str) -> str:
        module, _, name = value.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(
                f"{value!r} does not name a function: write file.py:function or module:function"
            )
        return value


class PythonScorer:
    """Calls the function and insists on a finite number."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: PythonConfig) -> None:
        self._name = config.function
        self._function = _find_function(config.function)
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
        with boundary(TaskError, f"Task {task.id}: the scorer {self._name} failed"):
            if self._is_async:
                verdict = self._function(task, completion)
            else:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._thread, self._call, task, completion)
            value = await verdict if inspect.isawaitable(verdict) else verdict
        if not isinstance(value, Real) or not math.isfinite(value):
            raise TaskError(
                f"Task {task.id}: the scorer {self._name} returned {value!r} "
                f"({type(value).__name__}); return a finite number or a bool."
            )
        return float(value)


# The one place where a name in a config becomes an import: here the user names code of his own,
# which no dict of ours can list.
def _find_function(spec: str) -> Callable[[Task, Completion], Verdict]:
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = vars(module).get(name)
    if not callable(function):
        names = sorted(
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        )
        found = f"its functions are {', '.join(names)}" if names else "it has no functions"
        raise TaskError(f"The scorer {spec} cannot be used: {place} has no {name}; {found}.")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(
            f"There is no scorer file {path} (looked in {path.absolute().parent}). "
            "Write file.py:function with a path from the current folder, or an absolute one."
        )
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"rookery_scorer_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    with boundary(TaskError, f"Reading the scorer file {path}"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    with boundary(
        TaskError,
        f"Importing the scorer module {name}",
        remedy={ModuleNotFoundError: "Install it, or name its file: path/to/file.py:function"},
    ):
        return importlib.import_module(name)
