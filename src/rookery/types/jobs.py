"""Work for executors, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Job",
    "JobCancelled",
    "JobDone",
    "JobFailed",
    "JobOutcome",
    "WorkerInfo",
    "WorkerLost",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work for an Executor, named by (attempt, epoch).

    Attempt 7 whose worker was lost is submitted again as (attempt=7, epoch=1): whatever still comes
    of epoch 0 is dropped.
    """

    attempt: int
    epoch: int
    payload: bytes
    """What the worker's task reads; the Executor does not look into it."""
    limit_s: float
    """How long a worker may take, not counting the time in the queue; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """The task returned."""

    output: bytes
    seconds: float
    """Time in the task, measured by the worker."""
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The task raised. Its worker lives."""

    error: str
    seconds: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The worker ended or was killed before it answered: a signal, a dead node, `Job.limit_s`.

    Nothing is known of the job: it may be the cause, and it may have been done.
    """

    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """It was cancelled, replaced by a newer epoch, or the Executor was closed."""

    reason: str


JobOutcome = JobDone | JobFailed | WorkerLost | JobCancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker said of itself when it was started, and why it gets no work if so."""

    name: str
    version: str | None = None
    """Of Rookery; None when the worker did not get as far as to say it."""
    cores: int | None = None
    about: str = ""
    """What its task says of itself, for example which sandbox it uses."""
    refusal: str = ""
    """Why it gets no work; "" when it does."""
