"""Work that runs side by side and fails with one error, not with a group of them."""

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from rookery.errors import RookeryError

__all__ = ["run_in_thread", "run_to_end", "task_group", "together"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup. The first error ends the others, and is raised when they ended."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        # An error of ours is a sentence, and tells more than what followed from it.
        first = min(errors.exceptions, key=lambda error: not isinstance(error, RookeryError))
    else:
        return
    raise first


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order."""
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


async def run_in_thread(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """As `asyncio.to_thread`, but who is cancelled, however often, waits for the thread to end: a
    thread that writes must not go on writing into what the caller then closes."""
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)
    return await _ended(asyncio.get_running_loop().run_in_executor(None, call))


async def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What cleans up: who is cancelled, however often, waits for its end all the same. It has a
    limit of its own."""
    return await _ended(asyncio.ensure_future(work))


async def _ended(work: "asyncio.Future[Result]") -> Result:
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # seen: the cancellation is what counts
    raise cancelled
