"""How a command is stopped: Ctrl-C and SIGTERM end its work in order, a second one kills at once.

    with stop_signals():                # around the whole command
        run_stoppable(work())           # around its event loop: the first signal cancels the work
    except Stopped as stop:
        sys.exit(stop.code)             # 130 for Ctrl-C, 143 for SIGTERM

Cancelled work closes what it opened: servers end, and the run is left interrupted, to be resumed.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

__all__ = ["Stopped", "run_stoppable", "stop_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Result = TypeVar("Result")


class Stopped(KeyboardInterrupt):
    """A signal that ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number
        """What the process exits with, as a shell would say it."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """Outside an event loop SIGTERM raises, as Ctrl-C does by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGTERM] is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_stoppable(work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work in an event loop. The first signal cancels it; then Stopped is raised."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    received: list[int] = []
    try:
        return asyncio.run(_stoppable(work, received))
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise


async def _stoppable(work: Coroutine[Any, Any, Result], received: list[int]) -> Result:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        _kill_next_time()
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as Ctrl-C is for a job in the background of a shell
            signal.signal(number, stop)
    try:
        return await work
    finally:
        if not received:
            for number, handler in before.items():
                signal.signal(number, handler)


def _raise(number: int, _: FrameType | None) -> NoReturn:
    _kill_next_time()
    raise Stopped(number)


def _kill_next_time() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
