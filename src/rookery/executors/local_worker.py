"""The program of a local worker process. local.py starts it; it exchanges frames on its pipes.

    worker -> hub   hello: version, cores
    hub -> worker   open: task, folder; settings as bytes
    worker -> hub   ready; description as text   |   refused; the reason as text
    hub -> worker   job; payload as bytes                         (one at a time, repeated)
    worker -> hub   answer: is_error, seconds; output as bytes

It ends when the pipe from the hub closes, because the hub closed it or died.
"""

import asyncio
import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rookery.errors import RookeryError
from rookery.executors.worker import (
    CLOSE_S,
    Frame,
    count_cores,
    open_task,
    read_frame,
    read_version,
    run_task,
    write_frame,
)
from rookery.types import Json

__all__ = ["main"]

_PARENT_POLL_MS = 1_000
"""If a fork of the hub holds the pipe open, only a changed parent id tells that the hub died."""


def main() -> None:
    """Serve until the hub is gone, then kill every process of this one's group."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A task that prints or reads its input must not touch the messages.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with suppress(asyncio.CancelledError, EOFError, BrokenPipeError):
        asyncio.run(_serve(requests, answers))
    _kill_group()


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    serving = asyncio.current_task()
    assert serving is not None
    watch = (requests.fileno(), asyncio.get_running_loop(), serving)
    threading.Thread(target=_end_with_hub, args=watch, daemon=True).start()
    write_frame(
        answers, Frame({"kind": "hello", "version": read_version(), "cores": count_cores()})
    )
    request = await asyncio.to_thread(read_frame, requests)
    folder = request.header["folder"]
    try:
        task = await open_task(
            str(request.header["task"]), request.content, Path(str(folder)) if folder else None
        )
    except RookeryError as error:
        write_frame(answers, Frame({"kind": "refused"}, str(error).encode(errors="replace")))
        return
    try:
        write_frame(answers, Frame({"kind": "ready"}, task.about.encode(errors="replace")))
        while True:
            request = await asyncio.to_thread(read_frame, requests)
            answer = await run_task(task, request.content)
            header: dict[str, Json] = {
                "kind": "answer",
                "is_error": answer.is_error,
                "seconds": answer.seconds,
            }
            write_frame(answers, Frame(header, answer.content))
    finally:
        await task.close()


def _end_with_hub(pipe: int, loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
    """Runs in a thread, so that a task that blocks the event loop does not outlive the hub."""
    parent = os.getppid()
    poller = select.poll()
    poller.register(pipe, 0)  # reports only that the other end is closed
    while not poller.poll(_PARENT_POLL_MS) and os.getppid() == parent:
        pass
    with suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(serving.cancel)
    time.sleep(CLOSE_S)
    _kill_group()


def _kill_group() -> None:
    """Kill this process and all that its task started."""
    if os.getpgrp() == os.getpid():  # otherwise it was started by hand, in the group of a shell
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
