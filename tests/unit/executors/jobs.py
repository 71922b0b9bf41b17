"""Jobs for the fake task, and waiting for other processes."""

import asyncio
import json
import sys
import textwrap
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

from rookery.types import Job, JobDone, JobOutcome

__all__ = ["is_alive", "job", "output", "read_ids", "run_hub", "until", "until_dead"]

LIMIT_S = 60.0


def job(attempt: int, *, epoch: int = 0, limit_s: float = LIMIT_S, **action: object) -> Job:
    """`job(1, echo="x")`"""
    return Job(attempt=attempt, epoch=epoch, payload=json.dumps(action).encode(), limit_s=limit_s)


def output(outcome: JobOutcome) -> object:
    assert isinstance(outcome, JobDone), outcome
    return json.loads(outcome.output)


async def until(condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  other processes tell no event
            await asyncio.sleep(0.01)


def read_ids(*paths: Path) -> list[int]:
    """What `wait` jobs wrote: for each its worker's id and that of a process of the worker."""
    return [int(word) for path in paths for word in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until_dead(*pids: int, limit_s: float) -> None:
    await until(lambda: not any(map(is_alive, pids)), limit_s=limit_s)


async def run_hub(opening: str, *, path: Path, before: str = "pass") -> Process:
    """Start a program that opens an executor and submits a `wait` job."""
    code = f"""
        import asyncio, os, time
        from rookery.executors import WorkerSpec, open_local, open_ray
        from rookery.testing import open_fake_task
        from rookery.types import Job

        async def main():
            async with {opening} as executor:
                {before}
                payload = b'{{"wait": "{path}"}}'
                await executor.submit(Job(attempt=1, epoch=0, payload=payload, limit_s=60))

        asyncio.run(main())
    """
    return await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code))
