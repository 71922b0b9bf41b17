"""Group commit: many who wait for the disk share one wait, made in a thread of its own.

    group = GroupCommit(store_all, name="events")      # store_all([item, ...]) -> [result, ...]
    await asyncio.wrap_future(group.submit(item))      # from an event loop
    group.submit(item).result()                        # from a thread
    group.close()                                      # stores what still waits

Items are stored in the order of `submit`. While one group waits for the disk the next one gathers,
so a single item costs one wait and 500 together cost one wait for all. Who stops waiting does not
take the item back: it is stored all the same.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from rookery.errors import RunError

__all__ = ["GroupCommit"]

Item = TypeVar("Item")
Result = TypeVar("Result")

GROUP_ITEMS = 4096
"""The most items of one commit: bounds how long the first of them waits for the last."""


class GroupCommit(Generic[Item, Result]):
    """One thread that stores items in groups.

    `commit` stores a group and returns an outcome per item: its result, or a RunError for an item
    that was refused and left nothing behind. When `commit` raises, nothing of the group is stored:
    all who wait get the error, and so does everybody after them, because a later item may build on
    one that was lost. What is stored is always a beginning of what was submitted.
    """

    def __init__(
        self, commit: Callable[[Sequence[Item]], Sequence[Result | RunError]], *, name: str
    ) -> None:
        self._commit = commit
        self._name = name
        # Filled by `submit`, drained by the thread. Unbounded: who fills it waits for the result.
        self._queue: queue.SimpleQueue[tuple[Item, Future[Result]] | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        """Held to submit, to close and to note a failure: nothing enters the queue after them."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._is_closed = False

    def submit(self, item: Item) -> "Future[Result]":
        """Have an item stored. The future ends when it is durable, or with a RunError."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled any more
        with self._state:
            if self._is_closed:
                raise RunError(f"{self._name} was closed: open the run again.")
            if self._failure is not None:
                raise _later(self._failure)
            if self._thread is None:
                # A daemon: a process that forgets to close ends all the same.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put((item, future))
        return future

    def close(self) -> None:
        """Store what still waits, then end the thread. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread, and must not write
        with self._state:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            group, is_last = self._gather()
            try:
                if group:
                    self._store(group)
            except BaseException as error:  # noqa: BLE001 - whatever it is, all who wait are told
                self._fail(error, group)
                return
            if is_last:
                return

    def _gather(self) -> tuple[list[tuple[Item, "Future[Result]"]], bool]:
        """All that wait now, at least one, and whether the queue was closed behind them."""
        group: list[tuple[Item, Future[Result]]] = []
        entry = self._queue.get()
        while entry is not None:
            group.append(entry)
            if len(group) == GROUP_ITEMS or self._queue.empty():
                return group, False
            entry = self._queue.get()  # at once: only this thread takes from the queue
        return group, True

    def _store(self, group: Sequence[tuple[Item, "Future[Result]"]]) -> None:
        outcomes = self._commit([item for item, _ in group])
        for (_, future), outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, RunError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, error: BaseException, group: Sequence[tuple[Item, "Future[Result]"]]) -> None:
        with self._state:
            self._failure = error
        waiting = [future for _, future in group if not future.done()]
        while not self._queue.empty():
            entry = self._queue.get()
            if entry is not None:
                waiting.append(entry[1])
        for future in waiting:
            # An error of its own for each: an exception raised in many tasks mixes their traces.
            future.set_exception(_copy(error))


def _copy(error: BaseException) -> RunError:
    copy = RunError(str(error) if isinstance(error, RunError) else f"Storing failed: {error!r}.")
    copy.__cause__ = error
    return copy


def _later(error: BaseException) -> RunError:
    return RunError(f"An earlier write failed, and nothing is stored after it. {_copy(error)}")
