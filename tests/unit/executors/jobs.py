"""Jobs for the fake task, and watching processes without sleeping for luck."""

import asyncio
import json
from pathlib import Path

from rookery.types import Job, JobDone, JobOutcome

__all__ = ["is_alive", "job", "output", "started", "until_dead"]

LIMIT_S = 30.0


def job(attempt: int, *, epoch: int = 0, limit_s: float = LIMIT_S, **action: object) -> Job:
    """`job(1, echo="x")`"""
    return Job(
        attempt=attempt, epoch=epoch, payload=json.dumps(action).encode(), limit_s=limit_s
    )


def output(outcome: JobOutcome) -> object:
    assert isinstance(outcome, JobDone), outcome
    return json.loads(outcome.output)


async def started(path: Path) -> list[int]:
    """The ids that a `wait` job wrote: its worker's and that of a process of the worker."""
    async with asyncio.timeout(LIMIT_S):
        while not path.exists():
            await asyncio.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until_dead(*pids: int, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.02)
