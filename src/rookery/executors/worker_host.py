"""The worker's side on machines that other programs start: holds the task and its folder."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from rookery.errors import RookeryError
from rookery.executors.folder import hold_folder
from rookery.executors.worker_task import Answer, WorkerTask, open_task, run_task

__all__ = ["WorkerHost"]


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
