"""What a worker runs: a task of this package, opened once and given one payload at a time.

    async def open_evaluation(settings: bytes, folder: Path | None) -> WorkerTask: ...

    TASKS = {"evaluation": "rookery.loops.evolve.evaluation_task:open_evaluation"}

A job names no function and carries no code: workers of an executor hold the one task of its
WorkerSpec, found by name in `TASKS`. Payloads and outputs are bytes that only the task reads.
"""

import importlib
import importlib.metadata
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from rookery.errors import ConfigError, RookeryError
from rookery.executors.folder import FolderPackage

__all__ = [
    "CLOSE_S",
    "MAX_MESSAGE_BYTES",
    "TASKS",
    "Answer",
    "OpenTask",
    "WorkerSpec",
    "WorkerTask",
    "count_cores",
    "open_task",
    "read_version",
    "run_task",
]

MAX_MESSAGE_BYTES = 64 << 20
"""Of a payload and of an output: far above any program or result, far below what ends a hub."""
CLOSE_S = 3.0
"""How long a task may take to close; then its worker is killed."""
MAX_ERROR_CHARS = 4_000
"""The end of a traceback, which names the error, is kept."""


class WorkerTask(Protocol):
    """One per worker, for as long as the worker lives; `run` is called for one job at a time."""

    @property
    def about(self) -> str:
        """What a person wants to know of it, for example which sandbox it uses; or ""."""
        ...

    async def run(self, payload: bytes) -> bytes:
        """The output. Must not block the event loop; what it raises becomes JobFailed."""
        ...

    async def close(self) -> None:
        """End what it holds; also called after `run` was cancelled."""
        ...


OpenTask = Callable[[bytes, Path | None], Awaitable[WorkerTask]]
"""Takes the settings and the folder of the WorkerSpec. A RookeryError says why this machine cannot
run it: the worker then gets no work."""

TASKS: Mapping[str, str] = {
    "evaluation": "rookery.loops.evolve.evaluation_task:open_evaluation",
    "fake": "rookery.executors.fake_task:open_fake_task",
}
"""Name -> the OpenTask as module:function. Text, because workers load only what they run, and tasks
are defined in higher layers than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of an executor holds."""

    task: str
    """A name of `TASKS`."""
    settings: bytes = b""
    folder: FolderPackage | None = None
    """Unpacked on the worker's machine before the task is opened."""
    startup_s: float = 0.0
    """How long the task may take to open, beyond the time for the worker's process."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"There is no task {self.task!r}; there are {', '.join(TASKS)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker sends back for one job."""

    is_error: bool
    content: bytes
    """The output, or the error as text."""
    seconds: float


def read_version() -> str:
    """Of the installed Rookery; `source` where it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("rookery")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def open_task(name: str, settings: bytes, folder: Path | None) -> WorkerTask:
    """Import and open a task of `TASKS`."""
    module, _, function = TASKS[name].partition(":")
    opening = cast(OpenTask, getattr(importlib.import_module(module), function))
    return await opening(settings, folder)


async def run_task(task: WorkerTask, payload: bytes) -> Answer:
    """Run one job; an exception of the task is an answer too."""
    start = time.perf_counter()
    try:
        content = await task.run(payload)
        if len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"The output has {len(content):,} bytes, over {MAX_MESSAGE_BYTES:,}.")
    except RookeryError as error:
        return _failed(str(error), start)
    except Exception:  # noqa: BLE001  any exception of the task is its answer, the worker lives on
        return _failed(traceback.format_exc()[-MAX_ERROR_CHARS:], start)
    return Answer(is_error=False, content=content, seconds=time.perf_counter() - start)


def _failed(error: str, start: float) -> Answer:
    seconds = time.perf_counter() - start
    return Answer(is_error=True, content=error.encode(errors="replace"), seconds=seconds)
