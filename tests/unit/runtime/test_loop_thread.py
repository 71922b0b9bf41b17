"""A loop in a thread: opening, running, closing, and what callers are told."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rookery.errors import FleetError
from rookery.runtime.concurrency import LoopThread


@asynccontextmanager
async def resource(happened: list[str]) -> AsyncIterator[str]:
    happened.append("open")
    try:
        yield "it"
    finally:
        await asyncio.sleep(0)
        happened.append("close")


async def where() -> str:
    return threading.current_thread().name


def test_work_runs_beside_the_resource_until_it_is_closed() -> None:
    happened: list[str] = []
    thread = LoopThread(resource(happened), name="beside")
    assert thread.wait_open() == "it" and thread.run(where) == "beside"
    assert happened == ["open"]
    thread.close()
    assert happened == ["open", "close"]
    thread.close()
    with pytest.raises(FleetError, match="was shut down: initialize it again"):
        thread.run(where)


def test_what_opening_raises_is_raised_to_who_opens() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[str]:
        raise KeyError("no")
        yield ""

    thread = LoopThread(broken(), name="broken")
    with pytest.raises(KeyError):
        thread.wait_open()
    with pytest.raises(FleetError, match="was shut down"):
        thread.run(where)


def test_errors_of_work_are_the_callers() -> None:
    async def fail() -> None:
        raise ValueError("as asked")

    async def give_up() -> None:
        raise asyncio.CancelledError

    thread = LoopThread(resource([]), name="errors")
    thread.wait_open()
    with pytest.raises(ValueError, match="as asked"):
        thread.run(fail)
    with pytest.raises(FleetError, match="shut down while this call waited"):
        thread.run(give_up)
    thread.close()


def test_callers_are_told_before_the_resource_is_closed() -> None:
    is_told, was_told = threading.Event(), list[bool]()

    @asynccontextmanager
    async def slow() -> AsyncIterator[str]:
        try:
            yield "it"
        finally:
            was_told.append(await asyncio.to_thread(is_told.wait, 5))

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.run(wait)
        except FleetError:
            is_told.set()

    began = threading.Event()
    thread = LoopThread(slow(), name="slow")
    thread.wait_open()
    caller = threading.Thread(target=call)
    caller.start()
    began.wait()
    thread.close()
    caller.join(10)
    assert was_told == [True]
