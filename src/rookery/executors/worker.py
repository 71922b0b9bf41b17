"""A worker as the pool sees it, independent of how messages travel."""

import asyncio
import importlib
import importlib.metadata
import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from rookery.errors import ConfigError, RookeryError
from rookery.executors.folder import FolderPackage, hold_folder
from rookery.types import Job, Json, WorkerInfo

__all__ = [
    "CLOSE_S",
    "MAX_MESSAGE_BYTES",
    "Frame",
    "JobReply",
    "Worker",
    "WorkerGone",
    "WorkerHost",
    "WorkerRefused",
    "WorkerSpec",
    "WorkerTask",
    "check_version",
    "count_cores",
    "open_task",
    "read_frame",
    "read_version",
    "receive_frame",
    "run_task",
    "write_frame",
]

# A worker's task: a task of this package, opened once and given one payload at a time.
#
#     async def open_evaluation(settings: bytes, folder: Path | None) -> WorkerTask: ...
#
#     spec = WorkerSpec(task=open_evaluation)
#
# A job names no function and carries no code: all workers of an executor hold the one task of its
# WorkerSpec, a function of this package. Only the task reads the bytes of payloads and outputs.


MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of a payload or an output: far above any program or result, and safe for the hub."""
CLOSE_S = 3.0
"""Seconds that a task may take to close before its worker is killed."""
MAX_ERROR_CHARS = 4_000
"""Characters kept from the end of a traceback, which names the error."""


class WorkerTask(Protocol):
    """One per worker, for the worker's lifetime; `run` is called for one job at a time."""

    @property
    def about(self) -> str:
        """Description for people, such as the sandbox in use; may be empty."""
        ...

    async def run(self, payload: bytes) -> bytes:
        """Return the output. Must not block the event loop; its exceptions become JobFailed."""
        ...

    async def close(self) -> None:
        """Release all resources; also called after `run` was cancelled."""
        ...


OpenTask = Callable[[bytes, Path | None], Awaitable[WorkerTask]]
"""Takes the settings and the folder of the WorkerSpec. A RookeryError says why this machine cannot
run the task: the worker then gets no work."""
PACKAGE = "rookery."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Specification of every worker of an executor."""

    task: OpenTask
    """A function in a module of this package: a worker imports nothing else."""
    settings: bytes = b""
    folder: FolderPackage | None = None
    """Unpacked on the worker's machine before the task is opened."""
    startup_s: float = 0.0
    """Seconds that the task may take to open, beyond the start of the worker's process."""

    @property
    def task_name(self) -> str:
        """`rookery.loops.evolve.problem:open_evaluation`."""
        return f"{self.task.__module__}:{self.task.__qualname__}"

    def __post_init__(self) -> None:
        _require_own(self.task_name)


def _require_own(name: str) -> None:
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function.isidentifier():
        raise ConfigError(f"A worker cannot run {name}: give a function of a module of rookery.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReply:
    """A worker's reply to one job."""

    is_error: bool
    content: bytes
    """The output, or the error as text."""
    seconds: float


def read_version() -> str:
    """Return the version of the installed Rookery; `source` if it runs from a checkout."""
    try:
        return importlib.metadata.version("rookery")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def open_task(name: str, settings: bytes, folder: Path | None) -> WorkerTask:
    """Import and open the task of a WorkerSpec by its `task_name`."""
    _require_own(name)
    module, _, function = name.partition(":")
    opening = cast(OpenTask, getattr(importlib.import_module(module), function))
    return await opening(settings, folder)


async def run_task(task: WorkerTask, payload: bytes) -> JobReply:
    """Run one job; an exception of the task becomes a reply too."""
    start = time.perf_counter()
    try:
        content = await task.run(payload)
        if len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"The output has {len(content):,} bytes, over {MAX_MESSAGE_BYTES:,}.")
    except RookeryError as error:
        return _failed(str(error), start)
    except Exception:  # noqa: BLE001  any exception of the task is its answer, the worker lives on
        return _failed(traceback.format_exc()[-MAX_ERROR_CHARS:], start)
    return JobReply(is_error=False, content=content, seconds=time.perf_counter() - start)


def _failed(error: str, start: float) -> JobReply:
    seconds = time.perf_counter() - start
    return JobReply(is_error=True, content=error.encode(errors="replace"), seconds=seconds)


class WorkerGone(Exception):
    """The worker ended or could not be started; another one may be tried."""


class WorkerRefused(Exception):
    """The worker's machine cannot run the task, and a retry would not change that."""

    def __init__(self, reason: str, *, info: WorkerInfo) -> None:
        super().__init__(reason)
        self.info = info


class Worker(Protocol):
    """A started worker that holds the task. Only the pool calls it."""

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def gone(self) -> asyncio.Future[str]:
        """Resolves to the reason when the worker ends, even while it is idle."""
        ...

    async def run(self, job: Job) -> JobReply:
        """Run one job at a time. Raises WorkerGone, at the latest soon after `kill`."""
        ...

    def kill(self) -> None:
        """Kill the worker and all it runs, without waiting. Idempotent."""
        ...

    async def close(self) -> None:
        """End the worker in order within a few seconds, else kill it."""
        ...


def check_version(info: WorkerInfo) -> None:
    """Refuse a worker of another Rookery version, whose messages and results may differ."""
    if info.version != read_version():
        raise WorkerRefused(
            f"It has Rookery {info.version}, this is {read_version()}. Install the same there.",
            info=info,
        )


# The worker's side on machines where another program starts it: holds the task and its folder.


class WorkerHost:
    """Opened once, then given one job at a time."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._task: WorkerTask | None = None
        self._running: asyncio.Task[JobReply] | None = None

    async def open(
        self, task: str, settings: bytes, *, digest: str | None, fetch: Callable[[], bytes]
    ) -> tuple[bool, str]:
        """Return whether this machine can run the task, with the task's description or the reason.
        If this machine lacks the folder of that digest, `fetch` is called in a thread."""
        try:
            folder = None
            if digest is not None:
                holding = hold_folder(digest, fetch)
                folder = await asyncio.to_thread(holding.__enter__)
                self._stack.push_async_callback(
                    asyncio.to_thread, holding.__exit__, None, None, None
                )
            self._task = await open_task(task, settings, folder)
        except RookeryError as error:
            await self.close()
            return False, str(error)
        self._stack.push_async_callback(self._task.close)
        return True, self._task.about

    async def run(self, payload: bytes) -> JobReply:
        assert self._task is not None
        self._running = asyncio.create_task(run_task(self._task, payload))
        return await self._running

    async def close(self) -> None:
        """Cancel the running job, close the task, release the folder."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._stack.aclose()


# Messages over a pipe: a line of JSON, then `size` bytes.
#
#   {"kind": "job", "size": 5}\nhello


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Json]
    content: bytes = b""

    def encode(self) -> bytes:
        header = {**self.header, "size": len(self.content)}
        return json.dumps(header).encode() + b"\n" + self.content


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Write a frame and flush."""
    stream.write(frame.encode())
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame:
    """Read a frame, blocking. Raises EOFError if the other end is closed."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header = json.loads(line)
    content = stream.read(header["size"])
    if len(content) < header["size"]:
        raise EOFError
    return Frame(header, content)


async def receive_frame(stream: asyncio.StreamReader) -> Frame:
    """Read a frame. Raises EOFError if the other end is closed, ConnectionError for other data."""
    try:
        header = json.loads(await stream.readuntil(b"\n"))
        return Frame(header, await stream.readexactly(header["size"]))
    except asyncio.IncompleteReadError:
        raise EOFError from None
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ConnectionError(f"Not a frame: {error}") from error
