"""Stops a command: Ctrl-C or SIGTERM cancels its work, a second one kills the process, and so does
a time limit after the first, if the command has one.

    with stop_signals():                # around the whole command
        run_stoppable(work())           # around its event loop: the first signal cancels the work
    except Stopped as stop:
        sys.exit(stop.code)             # 130 for Ctrl-C, 143 for SIGTERM

Cancelled work closes its resources: servers end, and the run stays interrupted, to be resumed.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Collection, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

__all__ = ["Stopped", "run_stoppable", "run_stoppable_in_thread", "stop_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
THREADS_S = 1.0
"""Time for computing threads to end after a command with a limit has ended."""
Result = TypeVar("Result")


class Stopped(KeyboardInterrupt):
    """A signal that ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number
        """Exit code of the process, 128 plus the signal's number."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """Make SIGTERM raise `Stopped` outside of event loops, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGTERM] is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_stoppable(work: Coroutine[Any, Any, Result], *, stop_s: float | None = None) -> Result:
    """Run the work in an event loop. The first signal cancels it; after its end Stopped is raised,
    with the handlers as before. If the process still runs `stop_s` after the signal, for example in
    a computing thread, it exits."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    with _cancelled_by_signals(loop, task, kills=SIGNALS, stop_s=stop_s):
        return _run_loop(loop, task)


def run_stoppable_in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    """`run_stoppable` in a new thread, for callers whose event loop runs already: notebooks.

    A second Ctrl-C does not kill, because it would end the notebook; a second SIGTERM kills.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    ended: Future[Result] = Future()

    def live() -> None:
        try:
            result = _run_loop(loop, task)
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            ended.set_exception(error)
        else:
            ended.set_result(result)

    thread = threading.Thread(target=live, name="rookery-run")
    with _cancelled_by_signals(loop, task, kills=(signal.SIGTERM,)):
        thread.start()
        try:
            return _outcome(ended)
        finally:
            thread.join()


def _outcome(ended: "Future[Result]") -> Result:
    """Wait for the thread's outcome: until then its run is open."""
    while not ended.done():
        with suppress(KeyboardInterrupt):  # from a handler set after ours
            wait([ended])
    return ended.result()


def _run_loop(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Result]") -> Result:
    async def end() -> Result:
        return await task

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(end())


@contextmanager
def _cancelled_by_signals(
    loop: asyncio.AbstractEventLoop,
    task: "asyncio.Task[Any]",
    *,
    kills: Collection[int],
    stop_s: float | None = None,
) -> Iterator[None]:
    """The first signal in the block cancels the task; a second one in `kills` kills."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            _kill_next_time(kills)
            if stop_s is not None:
                _exit_after(stop_s, number)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # ignored for background jobs of a shell
            signal.signal(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        if stop_s is not None:
            _exit_after(THREADS_S, received[0])
        raise Stopped(received[0])


def _exit_after(seconds: float, number: int) -> None:
    """Exit after so many seconds."""
    limit = threading.Timer(seconds, os._exit, [128 + number])
    limit.daemon = True
    limit.start()


def _raise(number: int, _: FrameType | None) -> NoReturn:
    _kill_next_time(SIGNALS)
    raise Stopped(number)


def _kill_next_time(numbers: Collection[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
