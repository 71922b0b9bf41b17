"""A worker as the pool sees it, whatever carries its messages."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol

from rookery.errors import RookeryError
from rookery.executors.folder import hold_folder
from rookery.executors.worker_task import Answer, WorkerTask, open_task, read_version, run_task
from rookery.types import Job, WorkerInfo

__all__ = [
    "Worker",
    "WorkerGone",
    "WorkerHost",
    "WorkerRefused",
    "check_version",
]


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

    async def run(self, job: Job) -> Answer:
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
        self._running: asyncio.Task[Answer] | None = None

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

    async def run(self, payload: bytes) -> Answer:
        assert self._task is not None
        self._running = asyncio.create_task(run_task(self._task, payload))
        return await self._running

    async def close(self) -> None:
        """Cancel the job that runs, close the task, let go of the folder."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._stack.aclose()
