"""The executor over any kind of worker: it assigns jobs and handles lost workers.

    submit -> queue -> an idle worker -> outcome

Each slot holds one worker: it starts a worker, gives it one job at a time, and starts another when
that one ends.

| waits                      | for                            | at most                           |
|----------------------------|--------------------------------|-----------------------------------|
| a slot that starts         | the worker's task to be opened | `START_S` and `startup_s`,        |
|                            |                                | `START_ATTEMPTS` times            |
| a slot with a job          | the answer                     | `Job.limit_s`, then it is killed  |
| a slot without a job       | a job, or its worker's end     | close                             |
| `submit`                   | an outcome                     | as long as there are slots        |
| jobs while no slot is left | a new slot                     | `down_s`, then ExecutorError      |

If a worker that had a job ends, it is replaced at once. If it ends before its first job, that is a
failed start; after `START_ATTEMPTS` of these in a row the slot ends with the reason.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rookery.errors import ConfigError, ExecutorError
from rookery.executors.worker import MAX_MESSAGE_BYTES, Worker, WorkerGone, WorkerRefused
from rookery.runtime.concurrency import task_group
from rookery.runtime.retry import Backoff
from rookery.types import (
    Job,
    JobCancelled,
    JobDone,
    JobFailed,
    JobOutcome,
    WorkerInfo,
    WorkerLost,
)

__all__ = ["WorkerPool", "check_num_workers", "closed_unless_opened", "open_pool"]

START_S = 120.0
"""Seconds for an interpreter and its imports, on a busy machine."""
START_ATTEMPTS = 3
RESTARTS = Backoff(first_s=1.0, longest_s=60.0)
"""Pauses of a slot whose worker failed."""

_log = logging.getLogger(__name__)

StartWorker = Callable[[str], Awaitable[Worker]]
"""Starts the worker of a slot. Raises WorkerGone or WorkerRefused."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A job in flight."""

    job: Job
    outcome: asyncio.Future[JobOutcome]
    num_waiters: int = 0
    worker: Worker | None = None


@dataclass(slots=True)
class WorkerPool:
    """An Executor, made by `open_pool`. Use it only in the event loop that opened it."""

    start: StartWorker
    slots: asyncio.TaskGroup
    down_s: float
    """Seconds that jobs wait for a new slot if none is left."""
    startup_s: float = 0.0
    """Seconds that a worker's task may take to open."""
    num_late: int = 0
    _in_flight: dict[int, _Entry] = field(default_factory=dict)
    _queue: OrderedDict[_Entry, None] = field(default_factory=OrderedDict)
    """Waiting jobs, none of them resolved. Filled by `submit`, drained by `_dispatch`."""
    _idle: deque[asyncio.Future[_Entry]] = field(default_factory=deque)
    """Slots that want a job. Cancelled ones are skipped."""
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ready: dict[str, Worker] = field(default_factory=dict)
    _refused: dict[str, WorkerInfo] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a worker is ready and when a slot ends."""
    _unlogged: list[str] = field(default_factory=list)
    """Warnings to log once a worker is ready; otherwise the final error contains them."""
    _down_timer: asyncio.TimerHandle | None = None
    _down: str = ""
    """Why nothing can be submitted any more; empty if it can."""

    @property
    def capacity(self) -> int:
        return len(self._ready)

    @property
    def num_slots(self) -> int:
        """Slots with a worker, or about to have one."""
        return len(self._tasks)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return (*(worker.info for worker in self._ready.values()), *self._refused.values())

    def add_slot(self, name: str) -> None:
        """Start a worker under this name and keep it running. Ignored once the pool is down."""
        if self._down:
            return
        self._stop_down_timer()
        self._tasks[name] = self.slots.create_task(self._serve(name), name=f"slot {name}")

    async def wait_ready(self) -> None:
        """Wait until a worker has its task open; raise ExecutorError if none can."""
        while not self._ready and not self._down:
            await self._changed.wait()
            self._changed.clear()
        if self._down:
            raise ExecutorError(self._down)

    async def submit(self, job: Job) -> JobOutcome:
        if self._down:
            raise ExecutorError(self._down)
        if len(job.payload) > MAX_MESSAGE_BYTES:
            raise ExecutorError(
                f"The payload of attempt {job.attempt} has {len(job.payload):,} bytes; at most "
                f"{MAX_MESSAGE_BYTES:,} are sent to a worker."
            )
        entry = self._in_flight.get(job.attempt)
        if entry is None or entry.job.epoch < job.epoch:
            if entry is not None:
                self._end(entry, JobCancelled(reason=f"Epoch {job.epoch} replaced it."))
            entry = self._add(job)
        elif entry.job.epoch > job.epoch:
            self.num_late += 1
            return JobCancelled(reason=f"Epoch {entry.job.epoch} is in flight already.")
        elif entry.job.payload != job.payload:
            raise ExecutorError(
                f"Attempt {job.attempt}, epoch {job.epoch} was submitted with two payloads; "
                "another payload needs another epoch."
            )
        return await self._wait(entry)

    def cancel(self, attempt: int) -> None:
        entry = self._in_flight.get(attempt)
        if entry is not None:
            self._end(entry, JobCancelled(reason="It was cancelled."))

    async def close(self) -> None:
        self._stop_down_timer()
        self._down = self._down or "The executor is closed."
        for entry in list(self._in_flight.values()):
            self._resolve(entry, JobCancelled(reason="The executor was closed."))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _add(self, job: Job) -> _Entry:
        entry = _Entry(job=job, outcome=asyncio.get_running_loop().create_future())
        self._in_flight[job.attempt] = entry
        self._queue[entry] = None
        self._dispatch()
        return entry

    async def _wait(self, entry: _Entry) -> JobOutcome:
        entry.num_waiters += 1
        try:
            return await asyncio.shield(entry.outcome)
        finally:
            entry.num_waiters -= 1
            if not entry.num_waiters:
                self._end(entry, JobCancelled(reason="Its caller was cancelled."))

    def _end(self, entry: _Entry, outcome: JobCancelled) -> None:
        """Resolve a job before its worker does, and kill the worker."""
        if not entry.outcome.done():
            self._resolve(entry, outcome)
            if entry.worker is not None:
                entry.worker.kill()

    def _resolve(self, entry: _Entry, outcome: JobOutcome | ExecutorError) -> None:
        del self._in_flight[entry.job.attempt]
        self._queue.pop(entry, None)
        if isinstance(outcome, ExecutorError):
            entry.outcome.set_exception(outcome)
        else:
            entry.outcome.set_result(outcome)

    def _dispatch(self) -> None:
        """Give waiting jobs to idle slots, both in order of arrival."""
        while self._queue and self._idle:
            request = self._idle.popleft()
            if not request.done():
                request.set_result(self._queue.popitem(last=False)[0])

    async def _serve(self, slot: str) -> None:
        """Keep the worker of one slot running until it is refused or cannot be started."""
        num_failed, limit_s = 0, START_S + self.startup_s
        try:
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        worker = await self.start(slot)
                    await self._feed(slot, worker)
                    num_failed = 0
                except (WorkerGone, TimeoutError) as error:
                    reason = str(error) or (
                        f"It was not ready within {limit_s:g} s: {START_S:g} s for its process, "
                        f"`startup_s` ({self.startup_s:g} s) for its task."
                    )
                    num_failed += 1
                    _log.warning("Worker %s: %s", slot, reason)
                    if num_failed == START_ATTEMPTS:
                        raise WorkerRefused(reason, info=WorkerInfo(name=slot)) from None
                    await asyncio.sleep(RESTARTS.pause_s(num_failed))
        except WorkerRefused as error:
            self._unlogged.append(f"Worker {slot} gets no work: {_ends_of(str(error))}")
            self._refused[slot] = replace(error.info, refusal=str(error))
            self._warn_of_refusals()
        finally:
            del self._tasks[slot]
            self._note_slot_ended()

    def _warn_of_refusals(self) -> None:
        while self._ready and self._unlogged:
            _log.warning("%s", self._unlogged.pop(0))

    async def _feed(self, slot: str, worker: Worker) -> None:
        """Give jobs to a worker until it ends. Raises WorkerGone if it ends without a job."""
        self._ready[slot] = worker
        self._warn_of_refusals()
        self._changed.set()
        try:
            entry = await self._next(worker)
            if entry is None:
                raise WorkerGone(worker.gone.result())
            while entry is not None and await self._run(worker, entry):
                entry = await self._next(worker)
        finally:
            del self._ready[slot]
            await worker.close()

    async def _next(self, worker: Worker) -> _Entry | None:
        """Return the next job for this worker; None if the worker ended."""
        request: asyncio.Future[_Entry] = asyncio.get_running_loop().create_future()
        self._idle.append(request)
        self._dispatch()
        either: set[asyncio.Future[Any]] = {request, worker.gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not worker.gone.done():
            return request.result()
        if not request.cancel():  # a job arrived at the same moment: the next worker gets it
            self._put_back(request.result())
        return None

    def _put_back(self, entry: _Entry) -> None:
        if not entry.outcome.done():
            self._queue[entry] = None
            self._queue.move_to_end(entry, last=False)
            self._dispatch()

    async def _run(self, worker: Worker, entry: _Entry) -> bool:
        """Run one job and deliver its outcome; return whether the worker can take another."""
        if entry.outcome.done():  # cancelled on its way here
            return True
        entry.worker = worker
        outcome = await self._ask(worker, entry.job)
        if entry.outcome.done():  # cancelled meanwhile, which killed the worker
            self.num_late += not isinstance(outcome, WorkerLost)
            return False
        self._resolve(entry, outcome)
        return not isinstance(outcome, WorkerLost)

    async def _ask(self, worker: Worker, job: Job) -> JobOutcome:
        name = worker.info.name
        try:
            async with asyncio.timeout(job.limit_s):
                answer = await worker.run(job)
        except TimeoutError:
            worker.kill()
            return WorkerLost(reason=f"It did not answer within {job.limit_s:g} s.", worker=name)
        except WorkerGone as error:
            return WorkerLost(reason=str(error), worker=name)
        if answer.is_error:
            error_text = answer.content.decode(errors="replace")
            return JobFailed(error=error_text, seconds=answer.seconds, worker=name)
        return JobDone(output=answer.content, seconds=answer.seconds, worker=name)

    def _note_slot_ended(self) -> None:
        self._changed.set()
        if not self._tasks and not self._down:
            loop = asyncio.get_running_loop()
            self._down_timer = loop.call_later(self.down_s, self._go_down)

    def _stop_down_timer(self) -> None:
        if self._down_timer is not None:
            self._down_timer.cancel()
            self._down_timer = None

    def _go_down(self) -> None:
        """Fail all waiting and future jobs, because no worker is left."""
        named: dict[str, list[str]] = {}
        for worker in self._refused.values():
            named.setdefault(worker.refusal, []).append(worker.name)
        reasons = [f"{', '.join(sorted(names))}: {refusal}" for refusal, names in named.items()]
        self._down = "No worker can run jobs. " + " ".join(reasons)
        self._changed.set()
        for entry in list(self._in_flight.values()):
            self._resolve(entry, ExecutorError(self._down))


def _ends_of(refusal: str) -> str:
    """Return the first and last line: of a traceback, what failed and how."""
    lines = refusal.strip().splitlines()
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def check_num_workers(number: int | None) -> None:
    """Refuse a number with which no job would ever run."""
    if number is not None and number < 1:
        raise ConfigError(f"`num_workers` is {number}; an executor needs at least 1.")


@asynccontextmanager
async def closed_unless_opened(worker: Worker) -> AsyncIterator[None]:
    """Kill and close a worker whose opening fails or is cancelled."""
    try:
        yield
    except BaseException:
        worker.kill()
        await worker.close()
        raise


@asynccontextmanager
async def open_pool(
    start: StartWorker, *, down_s: float, startup_s: float = 0.0
) -> AsyncIterator[WorkerPool]:
    """Yield a pool without slots; leaving the block ends all its workers."""
    async with task_group() as slots:
        pool = WorkerPool(start=start, slots=slots, down_s=down_s, startup_s=startup_s)
        try:
            yield pool
        finally:
            await pool.close()
