"""A task that does what its payload says: for tests of executors, of loops over them, of clusters.

{"echo": "x"}  {"fail": "why"}  {"exit": 3}  {"kill": 9}  {"read": "file"}  {"wait": "file"}
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from rookery.errors import SandboxError

__all__ = ["FakeTask", "open_fake_task"]


class FakeTask:
    """Knows the folder that it was opened with; every answer is JSON."""

    def __init__(self, *, about: str, folder: Path | None) -> None:
        self.about = about
        self._folder = folder

    async def run(self, payload: bytes) -> bytes:
        [(action, value)] = json.loads(payload).items()
        result = await getattr(self, f"_{action}")(value)
        return json.dumps(result).encode()

    async def close(self) -> None:
        pass

    async def _echo(self, value: object) -> object:
        return value

    async def _pid(self, _: object) -> int:
        return os.getpid()

    async def _fail(self, message: str) -> None:
        raise ValueError(message)

    async def _exit(self, code: int) -> None:
        os._exit(code)

    async def _kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    async def _read(self, name: str) -> str:
        if self._folder is None:
            raise SandboxError("The task was opened without a folder.")
        return (self._folder / name).read_text(encoding="utf-8")

    async def _print(self, text: str) -> str:
        """To standard output, which must not disturb the worker's messages."""
        sys.stdout.write(text)
        sys.stdout.flush()
        return text

    async def _wait(self, path: str) -> None:
        """Start a process, write its id and the worker's to the file, and never return."""
        child = await asyncio.create_subprocess_exec("sleep", "1000")
        await asyncio.to_thread(_write_whole, Path(path), f"{os.getpid()} {child.pid}")
        await child.wait()


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="ascii")
    draft.rename(path)


async def open_fake_task(settings: bytes, folder: Path | None) -> FakeTask:
    """Settings: {"refuse": "why"} (with "where": only if that variable is set), {"exit": code}."""
    document = json.loads(settings or b"{}")
    if "refuse" in document and document.get("where", "PATH") in os.environ:
        raise SandboxError(document["refuse"])
    if "exit" in document:
        os._exit(document["exit"])
    return FakeTask(about="fake", folder=folder)
