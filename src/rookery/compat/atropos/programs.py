"""Environments as child processes of a training: started, watched, and stopped with theirs.

    async with running(commands, words={"gateway": url, ...}, logs=folder) as programs:
        await programs.ended()            # waits, and returns the reason

Each has its own process group and log. If it ends with an error, it restarts after a growing pause.
It is stopped by id, never by name.
"""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rookery.environments.atropos import EnvironmentCommand
from rookery.errors import ConfigError
from rookery.runtime.process import ChildProcess
from rookery.runtime.retry import Backoff

__all__ = ["Programs", "check_commands", "running"]

logger = logging.getLogger(__name__)
STOP_S = 10.0
"""Time between asking a program to end and killing it."""
RESTARTS = Backoff(first_s=2.0, longest_s=64.0)
"""Pauses up to a minute: after a longer one, the run would have ended for lack of groups."""
SHOWN_LINES = 5
_BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


class Programs:
    """The environments of one run."""

    def __init__(
        self, commands: Sequence[EnvironmentCommand], *, words: Mapping[str, str], logs: Path
    ) -> None:
        self._commands = commands
        self._words = words
        self._logs = logs
        self._left = len(commands)
        self._ended = asyncio.Event()
        self._last = ""
        self.pids: dict[int, int] = {}
        """Process ids of running programs, by their index in the config."""

    async def ended(self) -> str:
        """Wait until no program is left; return why the last one ended."""
        await self._ended.wait()
        return self._last

    async def keep(self, place: int) -> None:
        """Run one program to its end, and restart it after errors as often as allowed."""
        command = self._commands[place]
        try:
            for attempt in range(command.restarts + 1):
                await asyncio.sleep(RESTARTS.pause_s(attempt))
                if await self._is_over(place, command):
                    break
        finally:
            self._left -= 1
            if self._left == 0:
                self._ended.set()

    async def _is_over(self, place: int, command: EnvironmentCommand) -> bool:
        """Run a program once; True if it ended without an error."""
        log = self._log(place)
        try:
            status = await self._run(place, command)
        except OSError as error:
            self._last = f"environment {place} cannot be started: {error}"
            logger.warning("%s", self._last)
            return False
        self._last = f"environment {place} ended with status {status}; its log is {log}"
        if status == 0:
            logger.info("%s", self._last)
            return True
        lines = await asyncio.to_thread(_last_lines, log)
        logger.warning("%s: %s", self._last, " | ".join(lines))
        return False

    async def _run(self, place: int, command: EnvironmentCommand) -> int:
        words = [self._filled(word) for word in command.command]
        child = await ChildProcess.start(
            [sys.executable, "-c", _BECOME, *words],
            log=self._log(place),
            env={**os.environ, **command.env},
            folder=command.folder,
        )
        self.pids[place] = child.pid
        try:
            return await child.wait()
        finally:
            await child.stop(limit_s=STOP_S)
            del self.pids[place]

    def _filled(self, word: str) -> str:
        for name, value in self._words.items():
            word = word.replace("{" + name + "}", value)
        return word

    def _log(self, place: int) -> Path:
        return self._logs / f"environment-{place}.log"


def check_commands(commands: Sequence[EnvironmentCommand]) -> None:
    """ConfigError if a command cannot be started."""
    for place, command in enumerate(commands):
        if not command.folder.is_dir():
            raise ConfigError(
                f"environments.{place}.folder is {command.folder}, and there is none: give the "
                "folder that the command is started in."
            )
        program = command.folder / command.command[0]
        if shutil.which(command.command[0]) is None and shutil.which(program) is None:
            raise ConfigError(
                f"environments.{place}.command cannot be started: there is no program "
                f"{command.command[0]}. Give the path of one."
            )


@asynccontextmanager
async def running(
    commands: Sequence[EnvironmentCommand], *, words: Mapping[str, str], logs: Path
) -> AsyncIterator[Programs]:
    """Start the programs; stop them at the end of the block, or when this process is killed."""
    programs = Programs(commands, words=words, logs=logs)
    tasks = [asyncio.create_task(programs.keep(place)) for place in range(len(commands))]
    try:
        yield programs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _last_lines(log: Path) -> list[str]:
    text = log.read_bytes()[-4000:].decode("utf-8", "replace")
    return text.splitlines()[-SHOWN_LINES:]
