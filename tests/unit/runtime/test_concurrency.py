"""Work in threads: who is cancelled waits for a thread that writes."""

import asyncio
import threading
from contextlib import suppress

import pytest

from rookery.runtime.concurrency import run_in_thread


async def test_who_is_cancelled_waits_for_the_thread() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert may_end.wait(10)
        ended.set()

    task = asyncio.create_task(run_in_thread(write))
    assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.05)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_results_and_errors_come_through() -> None:
    assert await run_in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divmod, 7, 0)
