"""The candidates of one generation on their way: made in a thread, loaded, let go at the end.

async with brood(names, nursery=nursery, adapters=engine) as arrivals:
    ref = await arrivals["g001-c03"]         # AdapterError when it cannot be made or loaded
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from rookery.loops.genome.nursery import Nursery
from rookery.ports import Adapters
from rookery.types import ModelRef

__all__ = ["Arrivals", "brood"]

Arrivals = Mapping[str, asyncio.Task[ModelRef]]
"""Each candidate by name: done when the engine has it."""


@asynccontextmanager
async def brood(
    names: Sequence[str], *, nursery: Nursery, adapters: Adapters
) -> AsyncIterator[Arrivals]:
    """Bring the candidates to the engine while the block goes on, those first that are soon made:
    the engine has work then while the others are."""
    making = asyncio.Lock()  # one at a time: making one takes every core there is

    async def bring(name: str) -> ModelRef:
        async with making:
            adapter = await asyncio.to_thread(nursery.adapter, name)
        return await adapters.load(adapter)

    in_turn = sorted(names, key=nursery.effort)
    arrivals = {name: asyncio.create_task(bring(name)) for name in in_turn}
    try:
        yield arrivals
    finally:
        for arrival in arrivals.values():
            arrival.cancel()
        ended = await asyncio.gather(*arrivals.values(), return_exceptions=True)
        await asyncio.gather(*(adapters.unload(ref) for ref in ended if isinstance(ref, ModelRef)))
