"""Servers that compute nothing while their weights change.

async with paused(replicas):
    model.set_weights(weights)                       # memory that the servers compute with
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rookery.concurrency import run_to_end, together
from rookery.fleet.routing.replica import Replica

__all__ = ["PAUSE", "PAUSE_ROUTE", "paused", "resume", "resume_all"]

PAUSE_ROUTE = "/pause"
PAUSE = f"{PAUSE_ROUTE}?mode=keep"
"""vLLM then forgets cached prefixes too; what is in flight is computed anew from its prompt."""


@asynccontextmanager
async def paused(replicas: Sequence[Replica]) -> AsyncIterator[None]:
    """None of these computes inside the block, and what one has cached is forgotten: requests of
    others may be in flight while weights are written."""
    try:
        await together(replica.client.post(PAUSE, b"") for replica in replicas)
        yield
    except BaseException:  # whatever it was: what waits at the servers goes on
        await run_to_end(resume_all(replicas))
        raise
    for answer in await run_to_end(resume_all(replicas)):
        if isinstance(answer, BaseException):
            raise answer


async def resume(replica: Replica) -> None:
    await replica.client.post("/resume", b"")


async def resume_all(replicas: Sequence[Replica]) -> list[Any]:
    """One that cannot be told does not keep the others; an answer or an error of each."""
    return await asyncio.gather(*map(resume, replicas), return_exceptions=True)
