"""The calls that wait for answers: every one ends with its answers or with a sentence.

    callers: await calls.answered(jobs)        driver: added, dropped = calls.take()
                                                       calls.leave(jobs)    # answered or dropped
                                                       calls.fail(jobs, error)

A job counts as in flight until `leave` or `fail`, also when its caller was cancelled: until then
the batcher may hold memory for it and compute with its adapter.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rookery.embedded.batcher import Job
from rookery.errors import EngineError, RookeryError
from rookery.types import ModelRef

__all__ = ["Calls"]


@dataclass(slots=True, eq=False)
class _Call:
    """One `sample` or `score` call: its jobs and who waits for them."""

    jobs: Sequence[Job]
    done: asyncio.Future[None]
    num_open: int


class Calls:
    """Belongs to one event loop. Bounded by the callers: each waits before it calls again."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set whenever the driver has something to see to; the driver clears it."""
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self._by_job: dict[int, _Call] = {}
        self._num_jobs: Counter[ModelRef] = Counter()
        # Filled by callers, drained by the driver's `take`.
        self._added: list[_Call] = []
        self._dropped: list[_Call] = []

    @property
    def num_in_flight(self) -> int:
        """Jobs that have not left."""
        return len(self._by_job)

    def uses(self, ref: ModelRef) -> bool:
        """Whether a job of this model is in flight."""
        return ref in self._num_jobs

    async def answered(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs and wait until all have their results."""
        if not jobs:
            return
        call = _Call(jobs, asyncio.get_running_loop().create_future(), len(jobs))
        self._by_job.update({id(job): call for job in jobs})
        self.idle.clear()
        self._num_jobs.update(job.request.model for job in jobs)
        self._added.append(call)
        self.changed.set()
        try:
            await call.done
        except asyncio.CancelledError:
            self._dropped.append(call)
            self.changed.set()
            raise

    def take(self) -> tuple[list[Job], list[Job]]:
        """The jobs that were added and those whose callers went away, since the last time."""
        added = [job for call in self._added for job in call.jobs]
        dropped = [job for call in self._dropped for job in call.jobs]
        self._added.clear()
        self._dropped.clear()
        return added, dropped

    def leave(self, jobs: Iterable[Job]) -> None:
        """The batcher holds these jobs no longer. A call ends with its last job."""
        for job in jobs:
            call = self._by_job.pop(id(job), None)
            if call is None:
                continue
            self._num_jobs[job.request.model] -= 1
            if not self._num_jobs[job.request.model]:
                del self._num_jobs[job.request.model]
            call.num_open -= 1
            if call.num_open == 0 and not call.done.done():
                call.done.set_result(None)
        if not self._by_job:
            self.idle.set()
        self.changed.set()

    def taken(self) -> list[Job]:
        """The jobs in flight that the driver has taken."""
        fresh = set(map(id, self._added))
        calls = {id(call): call for call in self._by_job.values() if id(call) not in fresh}
        return [job for call in calls.values() for job in call.jobs if id(job) in self._by_job]

    def drop(self, job: Job, error: RookeryError) -> None:
        """End the call of this job with an error; the batcher drops it with the next step."""
        call = self._by_job.get(id(job))
        if call is not None and not call.done.done():
            call.done.set_exception(error)
            self._dropped.append(call)

    def fail(self, jobs: Iterable[Job], error: EngineError) -> None:
        """End the calls of these jobs with this error; the batcher holds none of them."""
        calls = {id(call): call for job in jobs if (call := self._by_job.get(id(job)))}
        for call in calls.values():
            if not call.done.done():
                call.done.set_exception(error)
            self.leave(call.jobs)

    def end(self, error: EngineError) -> None:
        """End every call, those not yet taken too."""
        self._added.clear()
        self.fail(self.taken(), error)
        self._dropped.clear()
        self.changed.set()
