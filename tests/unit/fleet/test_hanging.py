"""Servers that live and answer nothing, or nonsense: noticed, started again when they are ours."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from fleet.adapters import make_small
from fleet.stub import Stub, serve

from rookery.errors import FleetDownError, FleetError, RookeryError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.http.client import Client, ClientConfig, ServerLost
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
    async with serve(Stub()) as [stub], asyncio.timeout(60):
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
    async with serve(Stub()) as [stub], asyncio.timeout(60):
        config = launching(monkeypatch, StubServer(stub, restarts=0))
        async with open_fleet(config) as fleet:
            stub.crash()
            with pytest.raises(FleetDownError, match="Given up, as asked"):
                await fleet.sample([ask(fleet)])


@pytest.mark.usefixtures("pool_times")
async def test_requests_are_sent_again_long_before_their_limit() -> None:
    async with serve(Stub()) as [stub], asyncio.timeout(60):
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


NOBODY = "http://127.0.0.1:1/v1/completions"
TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"


def redirect(location: str, status: int = 307) -> Callable[[web.Request], web.Response]:
    return lambda _: web.Response(status=status, headers={"Location": location})


def cut(request: web.Request, last: bytes = b"") -> web.Response:
    assert request.transport is not None
    if last:
        request.transport.write(last)
        request.transport.close()
    else:
        request.transport.abort()
    return web.Response()


FAULTS: dict[str, Callable[[web.Request], web.Response]] = {
    "redirect to nobody": redirect(NOBODY),
    "redirect to itself": redirect("/v1/completions", 301),
    "see other": redirect("/health", 303),
    "redirect to nowhere": redirect(""),
    "redirect to no address": redirect("http://[::"),
    "not modified": lambda _: web.Response(status=304),
    "reset": cut,
    "TLS": lambda request: cut(request, TLS_ALERT),
    "no HTTP": lambda request: cut(request, b"HTTP/9.9 what\r\n\r\n"),
    "half an answer": lambda request: cut(
        request, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"
    ),
    "no JSON": lambda _: web.Response(text="{", content_type="application/json"),
    "another page": lambda _: web.Response(text="Welcome!"),
    "failed": lambda _: web.Response(status=502),
    "busy": lambda _: web.Response(status=503, headers={"Retry-After": "0"}),
}
"""What a server, or what is between, does to a POST. Its other routes are well."""


@dataclass
class FaultyStub(Stub):
    fault: Callable[[web.Request], web.Response] | None = None
    num_faults: int = 0

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.fault is None:
            return await super()._complete(request)
        self.num_faults += 1
        return self.fault(request)

    async def _load(self, request: web.Request) -> web.Response:
        if self.fault is None:
            return await super()._load(request)
        self.num_faults += 1
        return self.fault(request)


def impatient(*urls: str) -> FleetConfig:
    limits = ClientConfig(control_s=1.0, request_s=1.0, busy_s=0.2)
    return FleetConfig(urls=urls, all_down_timeout_s=0.5, client=limits)


LOADS = ("see other", "reset", "half an answer", "another page", "busy")


@pytest.mark.parametrize(
    ("fault", "is_load"),
    [
        *(pytest.param(fault, False, id=f"sample: {name}") for name, fault in FAULTS.items()),
        *(pytest.param(FAULTS[name], True, id=f"load: {name}") for name in LOADS),
    ],
)
async def test_a_call_ends_after_few_attempts_whatever_it_meets(
    fault: Callable[[web.Request], web.Response], *, is_load: bool
) -> None:
    async with serve(FaultyStub()) as [stub], open_fleet(impatient(stub.url)) as fleet:
        assert isinstance(stub, FaultyStub)
        stub.fault = fault
        async with asyncio.timeout(60):
            if is_load and fault is FAULTS["another page"]:
                await fleet.load(make_small("a"))  # all that vLLM says is a word
            elif is_load:
                with pytest.raises(RookeryError):
                    await fleet.load(make_small("a"))
            else:
                with pytest.raises(FleetError):
                    await fleet.sample([ask(fleet)])
        assert 1 <= stub.num_faults <= 6


@pytest.mark.parametrize("is_load", [False, True], ids=["sample", "load"])
async def test_a_call_that_reaches_nobody_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, *, is_load: bool
) -> None:
    """The server is well whenever it is looked at."""
    num_tries = 0

    async def unsent(*_: Any, **__: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        raise ServerLost("It was not sent.", is_broken=True, was_sent=False)

    async with serve(Stub()) as [stub], open_fleet(impatient(stub.url)) as fleet:
        monkeypatch.setattr(Client, "load_adapter" if is_load else "complete", unsent)
        async with asyncio.timeout(60):
            with pytest.raises(FleetError, match="It was not sent"):
                await (fleet.load(make_small("a")) if is_load else fleet.sample([ask(fleet)]))
        assert 3 <= num_tries <= 6


async def test_a_redirect_is_named_and_not_followed() -> None:
    async with serve(FaultyStub(), Stub()) as [stub, other]:
        async with open_fleet(impatient(stub.url)) as fleet:
            assert isinstance(stub, FaultyStub)
            stub.fault = redirect(f"{other.url}/v1/completions")
            with pytest.raises(FleetError, match=rf"redirects to .*: write {other.url}\."):
                await fleet.sample([ask(fleet)])
        assert not other.bodies and stub.num_faults == 1

        async def move(_: web.Request) -> web.Response:
            return web.Response(status=301, headers={"Location": f"{other.url}/v1/models"})

        async with serve(Stub(further=[web.get("/v1/models", move)])) as [old]:
            with pytest.raises(FleetError, match=rf"write {other.url}\."):
                async with open_fleet(impatient(old.url)):
                    pass


async def test_https_at_a_plain_port_is_refused_at_once() -> None:
    async with serve(Stub()) as [stub], asyncio.timeout(60):
        with pytest.raises(FleetError, match="can't be reached"):
            async with open_fleet(impatient(stub.url.replace("http:", "https:"))):
                pass
