"""Workers as processes of this machine.

    spec = WorkerSpec(task=open_evaluation, settings=..., folder=pack_folder(path))
    async with open_local(spec, num_workers=8) as executor:
        outcome = await executor.submit(Job(attempt=1, epoch=0, payload=b"...", limit_s=60))

Each worker is a new interpreter in its own session (not a fork, so it inherits no threads and locks
of this process), connected to this process only by pipes. It ends, with all processes it started,
if it is killed here, if the block ends, or if this process dies.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rookery.errors import signal_name
from rookery.executors.folder import hold_folder
from rookery.executors.pool import WorkerPool, check_num_workers, closed_unless_opened, open_pool
from rookery.executors.worker import (
    CLOSE_S,
    Frame,
    JobReply,
    WorkerGone,
    WorkerRefused,
    WorkerSpec,
    check_version,
    count_cores,
    receive_frame,
)
from rookery.types import Job, Json, WorkerInfo

__all__ = ["open_local"]

_STDERR_TAIL_BYTES = 2_000
"""Bytes kept from the end of a worker's stderr, for the reason of its end."""
_OWN_EXIT_S = 1.0
"""Seconds that a worker which closed its pipe may take to exit: its code is the reason."""
_EXIT_S = 5.0
"""Seconds that a killed process may take to be gone."""


@asynccontextmanager
async def open_local(
    spec: WorkerSpec, *, num_workers: int | None = None
) -> AsyncIterator[WorkerPool]:
    """Yield an Executor of `num_workers` processes, by default one per core, once one is ready."""
    check_num_workers(num_workers)
    async with AsyncExitStack() as stack:
        folder: Path | None = None
        if spec.folder is not None:
            content = spec.folder.content
            holding = hold_folder(spec.folder.digest, lambda: content)
            folder = await asyncio.to_thread(holding.__enter__)
            stack.push_async_callback(asyncio.to_thread, holding.__exit__, None, None, None)

        async def start(name: str) -> LocalWorker:
            return await _start(name, spec, folder)

        pool = await stack.enter_async_context(
            open_pool(start, down_s=0.0, startup_s=spec.startup_s)
        )
        for number in range(num_workers or count_cores()):
            pool.add_slot(f"local/{number}")
        await pool.wait_ready()
        yield pool


class LocalWorker:
    """A worker process and its pipes."""

    def __init__(self, name: str, process: Process) -> None:
        loop = asyncio.get_running_loop()
        self.info = WorkerInfo(name=name)
        self.gone: asyncio.Future[str] = loop.create_future()
        self._process = process
        self._answer: asyncio.Future[Frame] = loop.create_future()
        self._last_words = bytearray()
        self._listening = loop.create_task(self._listen_stderr())
        self._reading = loop.create_task(self._read())

    async def open(self, spec: WorkerSpec, folder: Path | None) -> None:
        """Shake hands: see local_worker.py."""
        hello = (await self._answer).header
        self.info = replace(
            self.info, version=str(hello["version"]), cores=int(str(hello["cores"]))
        )
        check_version(self.info)
        header: dict[str, Json] = {
            "kind": "open",
            "task": spec.task_name,
            "folder": str(folder) if folder else None,
        }
        opened = await self._ask(Frame(header, spec.settings))
        text = opened.content.decode(errors="replace")
        if opened.header["kind"] == "refused":
            raise WorkerRefused(text, info=self.info)
        self.info = replace(self.info, about=text)

    async def run(self, job: Job) -> JobReply:
        frame = await self._ask(Frame({"kind": "job"}, job.payload))
        return JobReply(
            is_error=frame.header["is_error"] is True,
            content=frame.content,
            seconds=float(str(frame.header["seconds"])),
        )

    def kill(self) -> None:
        # The id names the group as long as one of its processes lives.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        try:
            self._stdin.close()
            await asyncio.wait({self._reading}, timeout=CLOSE_S + 1.0)
        finally:
            self.kill()
            await asyncio.wait({self._reading}, timeout=2 * _EXIT_S)
            self._listening.cancel()

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    async def _ask(self, frame: Frame) -> Frame:
        if self.gone.done():
            raise WorkerGone(self.gone.result())
        self._answer = asyncio.get_running_loop().create_future()
        with suppress(ConnectionError):  # `_read` sees the same error, with the reason
            self._stdin.write(frame.encode())
            await self._stdin.drain()
        return await self._answer

    async def _read(self) -> None:
        """Pass each frame to its waiter; at the end, for any reason, set `gone`."""
        reason = "Its messages cannot be read."
        try:
            await self._hand_over()
            reason = await self._end()
        finally:
            self.gone.set_result(reason)
            if not self._answer.done():
                self._answer.set_exception(WorkerGone(reason))

    async def _hand_over(self) -> None:
        assert self._process.stdout is not None
        with suppress(EOFError, ConnectionError):
            while True:
                frame = await receive_frame(self._process.stdout)
                if not self._answer.done():  # the caller may have given up
                    self._answer.set_result(frame)

    async def _end(self) -> str:
        """End the rest of the worker and return how it ended."""
        for limit_s in (_OWN_EXIT_S, _EXIT_S):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), limit_s)
            self.kill()
        await asyncio.wait({self._listening}, timeout=0.5)
        return self._describe_end()

    async def _listen_stderr(self) -> None:
        assert self._process.stderr is not None
        while text := await self._process.stderr.read(_STDERR_TAIL_BYTES):
            self._last_words += text
            del self._last_words[:-_STDERR_TAIL_BYTES]

    def _describe_end(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            how = f"The worker was killed by {signal_name(-code)}."
        else:
            how = f"The worker ended with code {code}."
        words = self._last_words.decode(errors="replace").strip()
        return f"{how} Its last output: {words}" if words else how


async def _start(name: str, spec: WorkerSpec, folder: Path | None) -> LocalWorker:
    # -P: do not import from the current folder, which may hold any file.
    command = (sys.executable, "-P", "-m", "rookery.executors.local_worker")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as error:  # out of descriptors or processes for now
        raise WorkerGone(f"The worker could not be started: {error.strerror}.") from error
    worker = LocalWorker(name, process)
    async with closed_unless_opened(worker):
        await worker.open(spec, folder)
    return worker
