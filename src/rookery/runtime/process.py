"""A child process in a process group of its own, with a log.

    child = await ChildProcess.start([sys.executable, "-m", "server"], log=path)
    await child.wait()
    await child.stop(limit_s=10)  # SIGTERM to the group, wait, then SIGKILL

If this process is killed, the watcher beside the child (`guard.py`) ends the group.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rookery.runtime import guard

__all__ = ["ChildProcess"]

_POLL_S = 0.5


class ChildProcess:
    """A child that was started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> "ChildProcess":
        """Start `command`, which begins with a Python interpreter. Its output is appended to the
        log. Raises OSError if it cannot be started."""
        python, *arguments = command
        watcher = [guard.__file__, str(os.getpid())] if sys.platform == "linux" else []
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                python, *watcher, *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=env, cwd=folder, start_new_session=True,
            )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it is alive."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, *, limit_s: float) -> None:
        """Send SIGTERM to the group, wait up to `limit_s`, then kill it; at once if cancelled."""
        was_alive = self.is_alive
        if was_alive:
            guard.signal_group(self.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(TimeoutError):
                # The watcher of a dead child ends its group within STOP_S.
                async with asyncio.timeout(limit_s if was_alive else 2 * guard.STOP_S):
                    await self.wait()
                    while guard.group_members(self.pid):  # noqa: ASYNC110  no event tells
                        await asyncio.sleep(_POLL_S)
        finally:
            if was_alive:  # else its number may be another group's by now
                guard.kill_group(self.pid)
        await self.wait()

    def kill(self) -> None:
        """Kill the whole group at once."""
        if self.is_alive:
            guard.kill_group(self.pid)
