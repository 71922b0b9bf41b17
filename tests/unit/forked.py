"""Processes of their own for tests, forked from one that has imported torch and the loops: ready at
once, where a new Python takes seconds.

with forked(work, folder) as process:       # `work(folder)` runs there
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import rookery.cli
from rookery.runs import EventLog

__all__ = ["Forked", "forked", "kill_at_event", "run_code", "run_command"]

LIMIT_S = 240.0
"""The longest that `wait` waits: less than a test may take."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["rookery.compose.genome", "rookery.compose.grpo", "rookery.train.full"]
)


class Forked:
    """A process that was begun."""

    def __init__(self, process: Any, lines: TextIO) -> None:
        self._process = process
        self.lines = lines
        """What it writes to standard output; ends when it does."""

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def send(self, number: signal.Signals) -> None:
        """A signal, while it runs."""
        assert not self.has_ended, "it ended before"
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; of a signal the negative number."""
        self._process.join(LIMIT_S)
        assert self.has_ended, f"the process still runs after {LIMIT_S:g} s"
        return int(self._process.exitcode)


@contextmanager
def forked(
    work: Callable[..., object], *args: object, variables: Mapping[str, str] | None = None
) -> Iterator[Forked]:
    """`work(*args)` in another process, in this folder and with these variables of the environment
    and those given. Standard error is that of the tests. It is killed at the end."""
    reading, writing = _CONTEXT.Pipe(duplex=False)
    environment = {**os.environ, **(variables or {})}
    process = _CONTEXT.Process(
        target=_begin, args=(writing, Path.cwd(), environment, work, args), daemon=True
    )
    process.start()
    writing.close()
    with reading, open(reading.fileno(), encoding="utf-8", closefd=False) as lines:
        try:
            yield Forked(process, lines)
        finally:
            process.kill()
            process.join()


def run_code(text: str, *words: str) -> None:
    """What `python -c text words` does, for `forked`."""
    sys.argv = ["-c", *words]
    exec(compile(text, "<forked>", "exec"), {"__name__": "__main__"})


def run_command(errors: Path, *words: str) -> None:
    """What `rookery words 2> errors` does, for `forked`."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the end)
    rookery.cli.main(list(words))


def kill_at_event(number: int) -> None:
    """Have this process killed when so many events of a run are stored, wherever its loop is then:
    a kill from another process may come too late."""
    submit, left = EventLog.submit, number

    def stored(num: int) -> None:
        nonlocal left
        left -= num
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: EventLog, news: Any) -> Any:
        future = submit(self, news)
        future.add_done_callback(lambda _: stored(len(news)))
        return future

    EventLog.submit = counted  # type: ignore[method-assign]


def _begin(
    output: Connection,
    folder: Path,
    environment: dict[str, str],
    work: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(output.fileno(), 1)
    output.close()
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the end)
    work(*args)
    sys.stdout.flush()
