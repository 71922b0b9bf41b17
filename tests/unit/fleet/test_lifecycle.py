"""Every caller of a fleet is told at once: closing, defects, lost servers. Real HTTP."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fleet.adapters import make_small
from fleet.stub import Stub, requests, serve, until

from rookery.errors import FleetDownError, FleetError
from rookery.fleet import Fleet, FleetConfig, ServerLost, open_fleet
from rookery.fleet.residency import ServedAdapters
from rookery.fleet.routing.load import Call
from rookery.types import ModelRef, SampleRequest, SamplingParams

TOLD_S = 20.0
"""Far below every time limit of the fleet: what comes within it was not waited for."""


async def test_closing_tells_callers_in_flight_and_waiting() -> None:
    stub = Stub()
    async with serve(stub), AsyncExitStack() as stack:
        config = FleetConfig(urls=(stub.url,), max_in_flight=4)
        fleet = await stack.enter_async_context(open_fleet(config))
        ref = await fleet.load(make_small("a"))
        stub.hang = True
        callers = [asyncio.create_task(fleet.sample(requests(r, 8))) for r in (fleet.base, ref)]
        await stub.wait_in_flight(4)
        async with asyncio.timeout(TOLD_S):
            await stack.aclose()
            for caller in callers:
                with pytest.raises(FleetError, match="closed while this request was waiting"):
                    await caller


@pytest.mark.parametrize("is_called", [True, False])
async def test_a_load_that_is_under_way_leaves_nothing_behind(is_called: bool) -> None:
    """Whether a request needs the adapter, or its caller loads it on a server that must judge."""
    stub = Stub(load_s=0.3)
    async with serve(stub), AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet(FleetConfig(urls=(stub.url,))))
        work: Coroutine[object, object, object]
        if is_called:
            ref = await fleet.load(make_small("a"))
            stub.adapters.clear()
            await fleet.pool.replicas[0].reconnect(ServedAdapters())
            work = fleet.sample(requests(ref, 1))
        else:
            work = fleet.load(make_small("a"))
        before = stub.num_loads_begun
        caller = asyncio.create_task(work)
        await until(lambda: stub.num_loads_begun > before)
        await stack.aclose()
        await asyncio.wait([caller])
        await until(lambda: stub.loads.total() == stub.num_loads_begun)
        assert not stub.adapters
        if is_called:
            assert isinstance(caller.exception(), FleetError)


async def test_a_load_that_hangs_keeps_nothing_else_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up in time, the others are unloaded first, and its end is no stray error."""
    monkeypatch.setattr("rookery.fleet.residency.LEAVE_S", 0.2)
    stub = Stub()
    strays: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: strays.append(told["message"]))
    async with serve(stub):
        config = FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)
        async with open_fleet(config) as fleet:
            await fleet.load(make_small("b"))
            stub.load_s = 60.0
            caller = asyncio.create_task(fleet.load(make_small("a", seed=1)))
            await until(lambda: stub.num_loads_begun == 2)
            caller.cancel()
            await asyncio.wait([caller])
        assert stub.loads.total() == 1 and not stub.adapters
    assert "did not unload" in caplog.text and "it took longer than 0.2 s" in caplog.text
    await asyncio.sleep(0)
    del fleet, caller
    gc.collect()
    assert not strays


async def test_a_defect_of_the_driver_reaches_every_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub()
    async with serve(stub):
        with pytest.raises(FleetError, match="a defect"):
            async with open_fleet(FleetConfig(urls=(stub.url,), max_in_flight=2)) as fleet:
                stub.hang = True
                caller = asyncio.create_task(fleet.sample(requests(fleet.base, 8)))
                await stub.wait_in_flight(2)

                def fail(_: float) -> None:
                    raise ZeroDivisionError("a defect")

                monkeypatch.setattr(fleet.pool.router, "dispatch", fail)
                async with asyncio.timeout(TOLD_S):
                    with pytest.raises(FleetError, match="ZeroDivisionError: a defect"):
                        await caller
                    with pytest.raises(FleetError, match="a defect"):
                        await fleet.sample(requests(fleet.base, 1))


async def test_adapter_calls_do_not_wait_on_a_server_that_takes_none() -> None:
    able, base_only = Stub(), Stub(routes=("/v1/completions",))
    async with serve(able, base_only):
        config = FleetConfig(urls=(able.url, base_only.url), all_down_timeout_s=0.3)
        async with open_fleet(config) as fleet:
            ref = await fleet.load(make_small("a"))
            await able.stop()
            async with asyncio.timeout(30):
                with pytest.raises(FleetError, match=r"takes adapters has been up for 0.3 s"):
                    await fleet.sample(requests(ref, 3))
                assert len(await fleet.sample(requests(fleet.base, 3))) == 3
            await able.start()


async def test_one_server_whose_engine_dies_costs_a_wait() -> None:
    """vLLM answers 500 to everything until its process is gone; then there is nothing, then a new
    one."""
    stub = Stub()
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        stub.hang = True
        caller = asyncio.create_task(fleet.sample(requests(fleet.base, 32)))
        await stub.wait_in_flight(32)
        stub.crash()
        await until(lambda: _is_down(fleet))
        await stub.stop()
        assert not caller.done()
        stub.hang = False
        await stub.start()
        async with asyncio.timeout(60):
            assert len(await caller) == 32
        assert fleet.pool.num_resent == 32


async def test_two_servers_that_die_together_tell_the_call_that_ran_on_both() -> None:
    stubs = [Stub(latency_s=0.01, capacity=4), Stub(latency_s=0.01, capacity=4)]
    async with serve(*stubs):
        config = FleetConfig(urls=tuple(s.url for s in stubs), max_in_flight=8)
        async with open_fleet(config) as fleet:
            await fleet.sample(requests(fleet.base, 40))
            for stub in stubs:
                stub.hang = True
            caller = asyncio.create_task(fleet.sample(requests(fleet.base, 1)))
            await until(lambda: any(len(c.replicas) > 1 for c in _in_flight(fleet)))
            for stub, replica in zip(stubs, fleet.pool.replicas, strict=True):
                stub.healthy = False
                fleet.pool.suspect(replica, "the test says so")
            async with asyncio.timeout(TOLD_S):
                with pytest.raises(FleetError, match="the test says so"):
                    await caller
            assert _is_down(fleet)


def _in_flight(fleet: Fleet) -> list[Call]:
    return [call for replica in fleet.pool.replicas for call in replica.load.in_flight]


def _is_down(fleet: Fleet) -> bool:
    return not any(r.load.is_open or r.load.in_flight for r in fleet.pool.replicas)


async def test_a_fleet_that_is_cancelled_twice_leaves_no_adapters_on_servers() -> None:
    """As by a second Ctrl-C, while servers are told to forget them."""
    stub, is_used = Stub(), asyncio.Event()

    async def use() -> None:
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            for seed in range(5):
                ref = await fleet.load(make_small(f"a{seed}", seed))
                params = SamplingParams(max_tokens=1)
                await fleet.sample([SampleRequest(model=ref, prompt=(1, 2), params=params)])
            is_used.set()
            await asyncio.Event().wait()

    async with serve(stub):
        using = asyncio.create_task(use())
        await is_used.wait()
        using.cancel()
        while not stub.unloads:  # noqa: ASYNC110 - while the first is told
            await asyncio.sleep(0)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert len(stub.unloads) == 5 and not stub.adapters


async def test_adapter_calls_go_back_to_the_only_server_that_takes_them() -> None:
    able, base_only = Stub(), Stub(routes=("/v1/completions",))
    async with (
        serve(able, base_only),
        open_fleet(FleetConfig(urls=(able.url, base_only.url))) as fleet,
    ):
        ref = await fleet.load(make_small("a"))
        able.hang = True
        caller = asyncio.create_task(fleet.sample(requests(ref, 3)))
        await able.wait_in_flight(3)
        await able.stop()
        await until(lambda: not fleet.pool.replicas[0].load.is_open)
        able.hang = False
        await able.start()
        async with asyncio.timeout(60):
            assert len(await caller) == 3


# Loads, publications and cache resets that come while a server is away.


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
