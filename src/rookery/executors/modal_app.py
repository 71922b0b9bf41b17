"""The Modal app that `open_modal` calls; deploy it once per version of Rookery.

    pip install './rookery-0.1.0-py3-none-any.whl[modal]' && modal setup
    ROOKERY_MODAL_PACKAGES="scipy pandas" modal deploy -m rookery.executors.modal_app

Its image has Rookery's core, bubblewrap and the named packages, for evaluators that import them.
A container holds one task and runs one job at a time; Modal starts as many as there are calls. The
caller handles lost containers, so Modal retries nothing.
"""
# mypy: disable-error-code="untyped-decorator"
# Modal is not installed where types are checked.

import importlib.metadata
import os

import modal

from rookery.executors.worker import WorkerHost, count_cores, read_version

__all__ = ["APP_NAME", "FOLDERS_NAME", "ModalHost", "app"]

APP_NAME = "rookery-executors"
FOLDERS_NAME = "rookery-folders"
"""The modal.Dict of packed folders, by digest. Modal removes entries unread for a week."""
MAX_JOB_S = 3600
"""Most seconds that Modal lets a job take; `Job.limit_s` ends it sooner."""
MAX_CONTAINERS = 1_000
IDLE_S = 120
"""Seconds that an idle container stays: a warm one saves the next job the start of its task."""


def _make_image() -> modal.Image:
    """Build an image with this machine's sources and version; Rookery is not installed."""
    requirements = importlib.metadata.requires("rookery") or []
    core = [line for line in requirements if "extra ==" not in line]
    return (
        modal.Image.debian_slim(python_version="3.12")
        .apt_install("bubblewrap")
        .pip_install(*core, *os.environ.get("ROOKERY_MODAL_PACKAGES", "").split())
        .env({"ROOKERY_MODAL_VERSION": read_version()})
        .add_local_python_source("rookery")
    )


app = modal.App(APP_NAME)


@app.cls(
    image=_make_image() if modal.is_local() else None,
    retries=0,
    timeout=MAX_JOB_S,
    max_containers=MAX_CONTAINERS,
    scaledown_window=IDLE_S,
)
class ModalHost:
    """A container that holds the task of one WorkerSpec, opened by the first call."""

    task_name: str = modal.parameter()
    settings: bytes = modal.parameter()
    digest: str = modal.parameter()
    """Digest of the folder; empty without one."""

    @modal.method()
    async def hello(self) -> tuple[str, int, bool, str]:
        """Return version, cores, whether the task can run, and its description or the reason."""
        version = os.environ.get("ROOKERY_MODAL_VERSION") or read_version()
        _, is_open, text = await self._opened()
        return version, count_cores(), is_open, text

    @modal.method()
    async def run(self, payload: bytes) -> tuple[bool, bytes, float] | str:
        """Return (is_error, output or error, seconds); or a text if the task cannot run."""
        host, is_open, text = await self._opened()
        if not is_open:
            return text
        answer = await host.run(payload)
        return answer.is_error, answer.content, answer.seconds

    @modal.exit()
    async def close(self) -> None:
        host, _, _ = await self._opened()
        await host.close()

    async def _opened(self) -> tuple[WorkerHost, bool, str]:
        # Modal makes the instance without __init__, and restarts a container endlessly if its enter
        # hook fails. So the task is opened here, and a refusal is an answer.
        if "_state" not in vars(self):
            host = WorkerHost()
            is_open, text = await host.open(
                self.task_name, self.settings, digest=self.digest or None, fetch=self._read_folder
            )
            self._state = (host, is_open, text)
        return self._state

    def _read_folder(self) -> bytes:
        return bytes(modal.Dict.from_name(FOLDERS_NAME)[self.digest])
