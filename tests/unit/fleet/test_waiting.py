"""Loads, publications and cache resets that come while a server is away."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fleet.adapters import make_small
from fleet.stub import Stub, serve, until

from rookery.errors import FleetDownError
from rookery.fleet import Fleet, FleetConfig, ServerLost, open_fleet
from rookery.types import ModelRef

Ask = Callable[[Fleet], Coroutine[Any, Any, ModelRef | None]]
ASKS: dict[str, Ask] = {
    "load": lambda fleet: fleet.load(make_small("a")),
    "publish": lambda fleet: fleet.publish(make_small("a")),
    "reset": lambda fleet: fleet.reset_prefix_cache(),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_it_waits_for_a_server_that_is_started_again(ask: Ask) -> None:
    async with serve(Stub()) as [stub], open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        await stub.stop()
        asked = asyncio.create_task(ask(fleet))
        await until(lambda: asked.done() or fleet.pool.replicas[0].breaker.is_open)
        assert not asked.done()
        await stub.start()
        ref = await asyncio.wait_for(asked, 60)
        assert (stub.num_resets == 1) if ref is None else stub.loads[fleet.wire_name(ref)] == 1


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_it_fails_when_no_server_comes_back(ask: Ask) -> None:
    stub = Stub()
    async with (
        serve(stub),
        open_fleet(FleetConfig(urls=(stub.url,), all_down_timeout_s=0.3)) as fleet,
    ):
        await stub.stop()
        with pytest.raises(FleetDownError, match=r"has been up for 0\.3 s.*can't be reached"):
            await asyncio.wait_for(ask(fleet), 60)
        assert fleet.loaded == ()
        await stub.start()


async def test_a_load_that_servers_die_of_is_sent_twice_at_most() -> None:
    stub = Stub(dies_of_loads=True)
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        with pytest.raises(ServerLost):
            await asyncio.wait_for(fleet.load(make_small("a")), 60)
        assert stub.num_loads_begun == 2


async def test_closing_the_fleet_ends_the_wait() -> None:
    async with serve(Stub()) as [stub]:
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            await stub.stop()
            asked = asyncio.create_task(fleet.load(make_small("a")))
            await until(lambda: asked.done() or fleet.pool.replicas[0].breaker.is_open)
        with pytest.raises(FleetDownError, match="closed"):
            await asyncio.wait_for(asked, 60)
        await stub.start()
