"""A worker as the pool sees it, whatever carries its messages."""

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

# What a worker runs: a task of this package, opened once and given one payload at a time.
#
#     async def open_evaluation(settings: bytes, folder: Path | None) -> WorkerTask: ...
#
#     spec = WorkerSpec(task=open_evaluation)
#
# A job names no function and carries no code: workers of an executor hold the one task of its
# WorkerSpec, a function of this package. Payloads and outputs are bytes that only the task reads.


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
PACKAGE = "rookery."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of an executor holds."""

    task: OpenTask
    """A function of a module of this package: a worker imports it, and nothing else."""
    settings: bytes = b""
    folder: FolderPackage | None = None
    """Unpacked on the worker's machine before the task is opened."""
    startup_s: float = 0.0
    """How long the task may take to open, beyond the time for the worker's process."""

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
    """Import and open the task of a WorkerSpec by its `task_name`."""
    _require_own(name)
    module, _, function = name.partition(":")
    opening = cast(OpenTask, getattr(importlib.import_module(module), function))
    return await opening(settings, folder)


async def run_task(task: WorkerTask, payload: bytes) -> JobReply:
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
    return JobReply(is_error=False, content=content, seconds=time.perf_counter() - start)


def _failed(error: str, start: float) -> JobReply:
    seconds = time.perf_counter() - start
    return JobReply(is_error=True, content=error.encode(errors="replace"), seconds=seconds)


class WorkerGone(Exception):
    """The worker ended, or could not be started; another one may be tried."""


class WorkerRefused(Exception):
    """The worker's machine cannot run the task, and a second try would not change that."""

    def __init__(self, reason: str, *, info: WorkerInfo) -> None:
        super().__init__(reason)
        self.info = info


class Worker(Protocol):
    """A started worker that holds the task. Nobody but the pool speaks to it."""

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def gone(self) -> asyncio.Future[str]:
        """Resolves to the reason when the worker ends, also while it is idle."""
        ...

    async def run(self, job: Job) -> JobReply:
        """One job at a time. Raises WorkerGone, soon after `kill` at the latest."""
        ...

    def kill(self) -> None:
        """End it and what it runs, at once, without waiting. Idempotent."""
        ...

    async def close(self) -> None:
        """Let it end in order within a few seconds, else kill it."""
        ...


def check_version(info: WorkerInfo) -> None:
    """Refuse a worker whose messages and results another Rookery would make."""
    if info.version != read_version():
        raise WorkerRefused(
            f"It has Rookery {info.version}, this is {read_version()}. Install the same there.",
            info=info,
        )


# The worker's side on machines that other programs start: holds the task and its folder.


class WorkerHost:
    """Opened once, then given one job at a time."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._task: WorkerTask | None = None
        self._running: asyncio.Task[JobReply] | None = None

    async def open(
        self, task: str, settings: bytes, *, digest: str | None, fetch: Callable[[], bytes]
    ) -> tuple[bool, str]:
        """Whether this machine can run the task, and what the task says of itself or why not.

        `fetch` is called in a thread, if this machine lacks the folder of that digest.
        """
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
        """Cancel the job that runs, close the task, let go of the folder."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._stack.aclose()


# Messages over a pipe: a line of JSON, then as many bytes as its `size` says.
#
# {"kind": "job", "size": 5}\nhello


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Json]
    content: bytes = b""

    def encode(self) -> bytes:
        header = {**self.header, "size": len(self.content)}
        return json.dumps(header).encode() + b"\n" + self.content


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Write and flush."""
    stream.write(frame.encode())
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame:
    """Blocks. Raises EOFError when the other end is closed."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header = json.loads(line)
    content = stream.read(header["size"])
    if len(content) < header["size"]:
        raise EOFError
    return Frame(header, content)


async def receive_frame(stream: asyncio.StreamReader) -> Frame:
    """Raises EOFError when the other end is closed, ConnectionError when it sends no frame."""
    try:
        header = json.loads(await stream.readuntil(b"\n"))
        return Frame(header, await stream.readexactly(header["size"]))
    except asyncio.IncompleteReadError:
        raise EOFError from None
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ConnectionError(f"Not a frame: {error}") from error
