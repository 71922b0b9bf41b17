"""The Modal executor against Modal's SDK, offline; nothing is sent anywhere.

The app is built, its methods run here, and the calls of the hosted service are bound to the SDK's
signatures.

Needs Modal (`pip install 'rookery[modal]'`) in this interpreter.
"""

import asyncio
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from executors.jobs import job, until

from rookery.errors import ExecutorError
from rookery.executors import WorkerSpec, open_modal, pack_folder
from rookery.executors.modal import ModalWorker
from rookery.executors.pool import WorkerPool, open_pool
from rookery.executors.worker import read_version
from rookery.testing import open_fake_task
from rookery.types import JobCancelled, JobDone, JobFailed, WorkerLost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("modal") is None, reason="Modal is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(60),
]

# Modal reads it when it is imported: an account of whoever runs the tests is not used.
os.environ["MODAL_CONFIG_PATH"] = os.devnull


class Aio:
    """A method of the SDK that is called as `method.aio(...)`, with the real one's signature."""

    def __init__(self, real: Any, function: Any) -> None:
        assert callable(real.aio)
        self._signature = inspect.signature(real)
        self._function = function

    async def aio(self, *args: object, **kwargs: object) -> Any:
        self._signature.bind(None, *args, **kwargs)
        return await self._function(*args, **kwargs)


class LocalCall:
    """A modal.FunctionCall whose container is this process."""

    def __init__(self, work: Any) -> None:
        import modal

        self._task = asyncio.ensure_future(work)
        self.cancelled: list[dict[str, bool]] = []
        self.get = Aio(modal.FunctionCall.get, self._get)
        self.cancel = Aio(modal.FunctionCall.cancel, self._cancel)

    async def _get(self) -> Any:
        return await asyncio.shield(self._task)

    async def _cancel(self, **options: bool) -> None:
        self.cancelled.append(options)
        self._task.cancel()


class LocalHost:
    """An instance of the deployed class that runs the app's own methods in this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        from rookery.executors.modal_app import ModalHost

        digest = "" if spec.folder is None else spec.folder.digest
        # modal makes the constructor of the parameters; its decorator has no types.
        host: Any = ModalHost
        self.real = host(task_name=spec.task_name, settings=spec.settings, digest=digest)
        self.calls: list[LocalCall] = []
        self.hello, self.run = _Method(), _Method()
        self.hello.remote = Aio(self.real.hello.remote, self.real.hello.local)
        self.run.spawn = Aio(self.real.run.spawn, self._spawn)

    async def _spawn(self, *args: Any) -> LocalCall:
        self.calls.append(LocalCall(self.real.run.local(*args)))
        return self.calls[-1]


class _Method:
    remote: Aio
    spawn: Aio


@asynccontextmanager
async def workers_of(host: LocalHost) -> AsyncIterator[WorkerPool]:
    """A pool of one worker, when it is ready."""

    async def start(slot: str) -> ModalWorker:
        worker = ModalWorker(slot, host)
        await worker.open()
        return worker

    async with open_pool(start, down_s=0.0) as pool:
        pool.add_slot("modal/0")
        await pool.wait_ready()
        yield pool


def test_the_app_builds_and_the_calls_of_the_hub_bind() -> None:
    import modal

    from rookery.executors import modal_app

    assert isinstance(modal_app.app, modal.App) and modal_app.app.name == modal_app.APP_NAME
    inspect.signature(modal.Cls.from_name).bind(modal_app.APP_NAME, "ModalHost")
    inspect.signature(modal.Dict.from_name).bind(modal_app.FOLDERS_NAME, create_if_missing=True)
    inspect.signature(modal.Dict.put).bind(None, "digest", b"content", skip_if_exists=True)


def test_deploying_needs_nothing_but_an_account() -> None:
    command = [sys.executable, "-m", "modal", "deploy", "-m", "rookery.executors.modal_app"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MODAL_TOKEN")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and "Token missing" in done.stdout + done.stderr


async def test_jobs_run_through_the_methods_of_the_app(tmp_path: Path) -> None:
    host = LocalHost(WorkerSpec(task=open_fake_task))

    async with workers_of(host) as pool:
        assert [(w.version, w.about) for w in pool.workers] == [(read_version(), "fake")]
        done = await pool.submit(job(1, echo="x"))
        assert isinstance(done, JobDone) and done.output == b'"x"'
        failed = await pool.submit(job(2, fail="bad program"))
        assert isinstance(failed, JobFailed) and "bad program" in failed.error
        running = asyncio.create_task(pool.submit(job(3, wait=str(tmp_path / "a"))))
        await until((tmp_path / "a").exists)
        pool.cancel(3)
        assert isinstance(await running, JobCancelled)
        assert isinstance(await pool.submit(job(4, echo="x")), JobDone)
        assert host.calls[2].cancelled == [{"terminate_containers": True}]


async def test_a_container_that_modal_loses_is_a_lost_worker() -> None:
    import modal

    host = LocalHost(WorkerSpec(task=open_fake_task))

    async def lose(_: bytes) -> LocalCall:
        raise modal.exception.InternalFailure("The container was preempted.")

    async with workers_of(host) as pool:
        host.run.spawn = Aio(host.real.run.spawn, lose)
        lost = await pool.submit(job(1, echo="x"))
        assert isinstance(lost, WorkerLost)
        assert lost.reason == "InternalFailure: The container was preempted."


async def test_a_container_that_cannot_run_the_task_says_why() -> None:
    spec = WorkerSpec(task=open_fake_task, settings=b'{"refuse": "No sandbox works here."}')
    with pytest.raises(ExecutorError, match="No sandbox works here"):
        async with workers_of(LocalHost(spec)):
            pass


async def test_without_an_account_the_sentence_is_modals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    spec = WorkerSpec(task=open_fake_task, folder=pack_folder(tmp_path))
    with pytest.raises(ExecutorError, match=r"Modal app rookery-executors: .*[Tt]oken"):
        async with asyncio.timeout(30), open_modal(spec):
            pass
