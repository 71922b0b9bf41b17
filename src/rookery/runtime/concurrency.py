"""Concurrent work: task groups, threads, an event loop in a thread, questions asked once."""

import asyncio
import contextvars
import functools
import logging
import selectors
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, ParamSpec, TypeVar

from rookery.errors import FleetDownError, RookeryError

__all__ = [
    "CLOSE_S",
    "AskOnce",
    "LoopThread",
    "run_in_thread",
    "run_to_end",
    "task_group",
    "together",
]


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a TaskGroup. The first error cancels the others and is raised after they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        # A RookeryError says more than the errors that follow from it.
        first = min(errors.exceptions, key=lambda error: not isinstance(error, RookeryError))
    else:
        return
    raise first


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results, in order."""
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


async def run_in_thread(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Like `asyncio.to_thread`, but a cancelled caller waits for the thread to end: the thread must
    not write into a file that the caller then closes."""
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)
    return await _ended(asyncio.get_running_loop().run_in_executor(None, call))


async def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await a clean-up to its end, even if the caller is cancelled meanwhile. `work` must have a
    time limit of its own."""
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
        work.exception()  # marks it as retrieved; the cancellation is raised
    raise cancelled


# An event loop in a thread of its own, with one resource open on it, for code that is not async.
#
#     thread = LoopThread(open_fleet(config), name="rookery-vllm")
#     fleet = thread.wait_open()
#     [[completion]] = thread.run(lambda: fleet.sample(requests))      # from any thread
#     thread.close()
#
# `close` ends every waiting call with an error within `CLOSE_S`; so does a loop that ends by
# itself.


logger = logging.getLogger(__name__)
CLOSE_S = 15.0
"""Longest wait of `close`: a hanging server must not keep the program from ending."""

Resource = TypeVar("Resource")


class LoopThread(Generic[Resource]):
    """Opens `context` in a new thread and keeps it open until `close`."""

    def __init__(self, context: AbstractAsyncContextManager[Resource], *, name: str) -> None:
        # Not epoll: a forked process shares its interest list, so destroying the child's copy of
        # this loop would unregister this loop's descriptors.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self._loop.set_default_executor(_Executor())
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: set[Future[Any]] = set()
        self._opened: Future[Resource] = Future()
        self._life = self._loop.create_task(self._hold(context))
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def wait_open(self) -> Resource:
        """Return the resource, or raise the error of its opening; FleetDownError after `close`."""
        try:
            return self._opened.result()
        except CancelledError:
            raise FleetDownError("The client was shut down before it was connected.") from None
        except BaseException:  # also Ctrl-C: the thread must not go on opening
            self.close()
            raise

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Await `work` on the loop. Raises FleetDownError if the loop is closed meanwhile."""

        async def wait() -> Result:
            return await work()

        with self._lock:
            if self._is_closed:
                raise FleetDownError("The client was shut down: initialize it again.")
            future = asyncio.run_coroutine_threadsafe(wait(), self._loop)
            self._waiting.add(future)
        try:
            return future.result()
        except CancelledError:
            raise FleetDownError(
                "The client was shut down while this call waited for its answer: initialize it "
                "again and repeat the call."
            ) from None
        finally:
            future.cancel()  # after Ctrl-C nobody waits for it
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """Wake all callers, close the resource and end the thread. Idempotent."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        # Before the resource closes, so that callers get the sentence about the shutdown.
        self._wake()
        if is_first:
            self._loop.call_soon_threadsafe(self._life.cancel)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s did not close within %g s", self._thread.name, CLOSE_S)

    def _wake(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def _live(self) -> None:
        try:
            self._loop.run_until_complete(self._life)
        except asyncio.CancelledError:
            pass  # closed
        except BaseException as error:  # noqa: BLE001 - raised by wait_open, or logged
            if self._opened.done():
                logger.error("%s ended: %r", self._thread.name, error)
            else:
                self._opened.set_exception(error)
        with self._lock:
            self._is_closed = True
        self._loop.run_until_complete(_end_tasks())
        self._wake()
        self._opened.cancel()
        self._loop.close()

    async def _hold(self, context: AbstractAsyncContextManager[Resource]) -> None:
        async with context as resource:
            self._opened.set_result(resource)
            await asyncio.get_running_loop().create_future()  # until cancelled


async def _end_tasks() -> None:
    """Cancel all other tasks of the loop."""
    await asyncio.sleep(0)  # coroutines handed over last become tasks
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class _Executor(ThreadPoolExecutor):
    """Runs in the calling thread if the interpreter exits and can start no thread."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[Result] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)
            return future


# Questions by key, each asked once: a second asker waits for the first one's answer.
#
#     once = AskOnce[Context, Read]()
#     reads = await once.know(contexts_by_key, ask_block, size=32, places=asyncio.Semaphore(16))
#
# | stage  | consumes             | produces            | waits for                              |
# |--------|----------------------|---------------------|----------------------------------------|
# | blocks | new questions        | blocks of `size`    | a place among the blocks in flight     |
# | answer | a block              | its answers, stored | the engine, the disk                   |
# | others | questions in flight  | their answers       | the first asker; asks itself if it ends |


Question = TypeVar("Question")
Answer = TypeVar("Answer")


class AskOnce(Generic[Question, Answer]):
    """Shares the questions in flight. The caller remembers earlier answers."""

    def __init__(self) -> None:
        # Filled and drained by `know`; an asker that ends early leaves None to those who wait.
        self._in_hand: dict[str, asyncio.Future[tuple[Answer] | None]] = {}

    async def know(
        self,
        questions: Mapping[str, Question],
        answer: Callable[[Mapping[str, Question]], Awaitable[Mapping[str, Answer]]],
        *,
        size: int,
        places: asyncio.Semaphore,
    ) -> dict[str, Answer]:
        """Return the answer to each question. `answer` gets blocks of at most `size`, in order."""
        known: dict[str, Answer] = {}
        while left := [key for key in questions if key not in known]:
            waited = {key: self._in_hand[key] for key in left if key in self._in_hand}
            free = {key: questions[key] for key in left if key not in waited}
            known |= await self._ask(free, answer, size, places)
            for key, future in waited.items():
                box = await asyncio.shield(future)
                if box is not None:
                    known[key] = box[0]
        return known

    async def _ask(
        self,
        questions: Mapping[str, Question],
        answer: Callable[[Mapping[str, Question]], Awaitable[Mapping[str, Answer]]],
        size: int,
        places: asyncio.Semaphore,
    ) -> dict[str, Answer]:
        loop, keys, known = asyncio.get_running_loop(), list(questions), dict[str, Answer]()
        futures = {key: loop.create_future() for key in keys}
        self._in_hand |= futures

        async def ask(block: Sequence[str]) -> None:
            async with places:
                answers = await answer({key: questions[key] for key in block})
            known.update(answers)
            for key in block:
                futures[key].set_result((answers[key],))

        try:
            await together(ask(keys[first : first + size]) for first in range(0, len(keys), size))
        finally:
            for key, future in futures.items():
                del self._in_hand[key]
                if not future.done():
                    future.set_result(None)
        return known
