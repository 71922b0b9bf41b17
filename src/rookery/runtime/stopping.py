"""How a command is stopped: Ctrl-C and SIGTERM end its work in order, a second one kills at once,
and so does the limit of a command that has one.

    with stop_signals():                # around the whole command
        run_stoppable(work())           # around its event loop: the first signal cancels the work
    except Stopped as stop:
        sys.exit(stop.code)             # 130 for Ctrl-C, 143 for SIGTERM

Cancelled work closes what it opened: servers end, and the run is left interrupted, to be resumed.
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
"""How long threads that still compute are waited for when a command with a limit has ended."""
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


def run_stoppable(work: Coroutine[Any, Any, Result], *, stop_s: float | None = None) -> Result:
    """Run the work in an event loop. The first signal cancels it; when it has ended, Stopped is
    raised, and the handlers are as before. A process that is still there `stop_s` after the signal,
    perhaps in a thread that computes, ends then."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    with _cancelled_by_signals(loop, task, kills=SIGNALS, stop_s=stop_s):
        return _run_loop(loop, task)


def run_stoppable_in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    """The same in a thread of its own, for a thread whose event loop runs already: a notebook.

    There a second Ctrl-C waits too, as it would kill the notebook; a second SIGTERM kills.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    ended: Future[Result] = Future()

    def live() -> None:
        try:
            result = _run_loop(loop, task)
        except BaseException as error:  # noqa: BLE001 - belongs to the caller
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
    """The outcome of the thread, and not before: its run is open until then."""
    while not ended.done():
        with suppress(KeyboardInterrupt):  # of a handler that was set after ours
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
    """The first signal in the block cancels the task; a second one, of `kills`, kills."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            _kill_next_time(kills)
            if stop_s is not None:
                _exit_after(stop_s, number)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as Ctrl-C is for a job in the background of a shell
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
    """End the process then, if it is still there."""
    limit = threading.Timer(seconds, os._exit, [128 + number])
    limit.daemon = True
    limit.start()


def _raise(number: int, _: FrameType | None) -> NoReturn:
    _kill_next_time(SIGNALS)
    raise Stopped(number)


def _kill_next_time(numbers: Collection[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
