"""A worker as the pool sees it, whatever carries its messages."""

import asyncio
from typing import Protocol

from rookery.executors.worker_task import Answer, read_version
from rookery.types import Job, WorkerInfo

__all__ = ["Worker", "WorkerGone", "WorkerRefused", "check_version"]


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
