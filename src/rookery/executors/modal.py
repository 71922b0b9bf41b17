"""Workers as containers of Modal; deploy `modal_app.py` first.

    async with open_modal(spec, num_workers=64) as executor:
        outcome = await executor.submit(job)

A slot of the pool is one call in flight; Modal chooses the container that serves it. Written
against Modal's SDK and tested with it offline; not run against the hosted service.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

from rookery.errors import ConfigError, ExecutorError, boundary, install_extra
from rookery.executors.pool import WorkerPool, check_num_workers, closed_unless_opened, open_pool
from rookery.executors.worker import (
    CLOSE_S,
    JobReply,
    WorkerGone,
    WorkerRefused,
    WorkerSpec,
    check_version,
)
from rookery.types import Job, WorkerInfo

__all__ = ["ModalWorker", "open_modal"]

DEPLOY = "modal deploy -m rookery.executors.modal_app"
NUM_WORKERS = 16


class ModalWorker:
    """One call in flight, as the pool sees it. `host` is an instance of the deployed class."""

    def __init__(self, name: str, host: Any) -> None:
        self.info = WorkerInfo(name=name)
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._host = host
        self._call: Any = None
        self._cancelling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        with _lost_calls():
            version, cores, is_open, text = await self._host.hello.remote.aio()
        self.info = replace(self.info, version=version, cores=cores)
        check_version(self.info)
        if not is_open:
            raise WorkerRefused(text, info=self.info)
        self.info = replace(self.info, about=text)

    async def run(self, job: Job) -> JobReply:
        result = await self._first(self._call_run(job.payload))
        if isinstance(result, str):
            raise WorkerGone(result)
        is_error, content, seconds = result
        return JobReply(is_error=is_error, content=content, seconds=seconds)

    def kill(self) -> None:
        if not self.gone.done():
            self.gone.set_result("It was killed.")
        if self._call is not None and self._cancelling is None:
            self._cancelling = asyncio.create_task(self._cancel(self._call))

    async def close(self) -> None:
        self.kill()
        if self._cancelling is not None:
            await asyncio.wait({self._cancelling}, timeout=CLOSE_S)

    async def _call_run(self, payload: bytes) -> Any:
        with _lost_calls():
            self._call = await self._host.run.spawn.aio(payload)
            result = await self._call.get.aio()
        self._call = None
        return result

    async def _first(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`, unless the worker is killed first."""
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({working, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise WorkerGone(self.gone.result())
            return working.result()
        finally:
            working.cancel()

    async def _cancel(self, call: Any) -> None:
        with suppress(WorkerGone), _lost_calls():
            await call.cancel.aio(terminate_containers=True)


@contextmanager
def _lost_calls() -> Iterator[None]:
    """Turn errors of Modal itself into WorkerGone: a dead container, a limit, a lost connection.
    Errors of a task are in the result of the call."""
    import modal

    try:
        yield
    except (modal.exception.Error, OSError) as error:
        raise WorkerGone(f"{type(error).__name__}: {error}") from None


@asynccontextmanager
async def open_modal(
    spec: WorkerSpec, *, num_workers: int = NUM_WORKERS
) -> AsyncIterator[WorkerPool]:
    """Yield an Executor of `num_workers` calls to the deployed app, once one container is ready."""
    check_num_workers(num_workers)
    try:
        import modal

        from rookery.executors.modal_app import APP_NAME, FOLDERS_NAME
    except ImportError as error:
        remedy = install_extra("modal")
        raise ConfigError(f"Jobs on Modal need its SDK: {remedy}.") from error
    digest = "" if spec.folder is None else spec.folder.digest
    hint = {modal.exception.NotFoundError: f"Deploy the app first: {DEPLOY}"}
    with boundary(ExecutorError, f"Calling the Modal app {APP_NAME}", remedy=hint):
        hosts = await modal.Cls.from_name(APP_NAME, "ModalHost").hydrate.aio()
        host = hosts(task_name=spec.task_name, settings=spec.settings, digest=digest)
        if spec.folder is not None:
            folders = modal.Dict.from_name(FOLDERS_NAME, create_if_missing=True)
            await folders.put.aio(digest, spec.folder.content, skip_if_exists=True)

    async def start(slot: str) -> ModalWorker:
        worker = ModalWorker(slot, host)
        async with closed_unless_opened(worker):
            await worker.open()
        return worker

    async with open_pool(start, down_s=0.0, startup_s=spec.startup_s) as pool:
        for number in range(num_workers):
            pool.add_slot(f"modal/{number}")
        await pool.wait_ready()
        yield pool
