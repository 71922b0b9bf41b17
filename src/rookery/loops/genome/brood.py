"""The candidates of one generation on their way: made in a thread, loaded, let go at the end.

async with brood(names, make=nursery.adapter, adapters=engine) as arrivals:
    ref = await arrivals["g001-c03"]         # AdapterError when it cannot be made or loaded
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from rookery.ports import Adapters
from rookery.types import Adapter, ModelRef

__all__ = ["Arrivals", "brood"]

Arrivals = Mapping[str, asyncio.Task[ModelRef]]
"""Each candidate by name: done when the engine has it."""


@asynccontextmanager
async def brood(
    names: Sequence[str], *, make: Callable[[str], Adapter], adapters: Adapters
) -> AsyncIterator[Arrivals]:
    """Bring the candidates to the engine, in their order, while the block goes on."""
    making = asyncio.Lock()  # one at a time: making one takes every core there is

    async def bring(name: str) -> ModelRef:
        async with making:
            adapter = await asyncio.to_thread(make, name)
        return await adapters.load(adapter)

    arrivals = {name: asyncio.create_task(bring(name)) for name in names}
    try:
        yield arrivals
    finally:
        for arrival in arrivals.values():
            arrival.cancel()
        ended = await asyncio.gather(*arrivals.values(), return_exceptions=True)
        for ref in ended:
            if isinstance(ref, ModelRef):
                await adapters.unload(ref)
