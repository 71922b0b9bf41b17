"""Servers that live and answer nothing: noticed, started again when they are ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet.stub import Stub, serve

from rookery.errors import FleetDownError, FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.http.client import ClientConfig
from rookery.fleet.servers.settings import LaunchConfig
from rookery.types import SampleRequest, SamplingParams

LAUNCH = LaunchConfig(model="tiny", device="cpu", extension=False)
QUICK = ClientConfig(control_s=0.2)


class StubServer:
    """A stub as a server of our own: its process lives on while its engine is dead."""

    def __init__(self, stub: Stub, *, restarts: int = 3) -> None:
        self.stub = stub
        self.url = stub.url
        self.config = LAUNCH
        self.pid = 1
        self.is_alive = True
        self.reasons: list[str] = []
        self._restarts = restarts

    async def restart(self, why: str = "") -> None:
        self.reasons.append(why)
        if len(self.reasons) > self._restarts:
            raise FleetError("Given up, as asked.")
        await self.stub.stop()
        await self.stub.start()


@pytest.fixture
def pool_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.fleet.routing.pool.HANG_S", 0.5)
    monkeypatch.setattr("rookery.fleet.routing.pool.WATCH_S", 0.05)


def launching(monkeypatch: pytest.MonkeyPatch, server: StubServer) -> FleetConfig:
    @asynccontextmanager
    async def open_servers(*_: Any, **__: Any) -> AsyncIterator[list[StubServer]]:
        yield [server]

    monkeypatch.setattr("rookery.fleet.fleet.open_servers", open_servers)
    return FleetConfig(launch=LAUNCH, client=QUICK)


def ask(fleet: Any) -> SampleRequest:
    return SampleRequest(model=fleet.base, prompt=(1, 2), params=SamplingParams(max_tokens=1))


@pytest.mark.usefixtures("pool_times")
async def test_our_own_is_started_again_and_its_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve(Stub()) as [stub], asyncio.timeout(20):
        server = StubServer(stub)
        async with open_fleet(launching(monkeypatch, server)) as fleet:
            await fleet.sample([ask(fleet)])
            stub.crash()
            assert await fleet.sample([ask(fleet)]), "it waits for the restart"
    [why] = server.reasons
    assert why.startswith("was not healthy for")


@pytest.mark.usefixtures("pool_times")
async def test_it_is_given_up_when_its_restarts_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve(Stub()) as [stub], asyncio.timeout(20):
        config = launching(monkeypatch, StubServer(stub, restarts=0))
        async with open_fleet(config) as fleet:
            stub.crash()
            with pytest.raises(FleetDownError, match="Given up, as asked"):
                await fleet.sample([ask(fleet)])


@pytest.mark.usefixtures("pool_times")
async def test_requests_are_sent_again_long_before_their_limit() -> None:
    async with serve(Stub()) as [stub], asyncio.timeout(20):
        config = FleetConfig(urls=(stub.url,), client=QUICK)
        async with open_fleet(config) as fleet:
            [replica] = fleet.pool.replicas
            stub.hang = True
            answer = asyncio.create_task(fleet.sample([ask(fleet)]))
            await stub.wait_in_flight(1)
            stub.is_silent = True
            while replica.load.is_open:  # noqa: ASYNC110  the watcher tells no event
                await asyncio.sleep(0.01)
            assert "neither /metrics nor /health" in replica.last_error
            stub.hang = stub.is_silent = False
            assert len(await answer) == 1
