"""Servers by URL that have another model than the fleet was opened on, or other weights than they
were started with: noticed, not used, given their own weights back."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web
from fleet.stub import Stub, serve, until
from fleet.test_reload import Model

from rookery.errors import FleetDownError, FleetError
from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.fleet.admin import restore
from rookery.fleet.bridges.reload import update_weights
from rookery.fleet.http.client import ClientConfig
from rookery.fleet.routing.paused import VERSION, TrainerLock, WeightsMark, is_trained
from rookery.fleet.servers.registry import process_start
from rookery.types import CompletionDelta, SampleRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0)
ROUTES = (*Stub().routes, "/collective_rpc", VERSION)


async def sample(
    fleet: Fleet, on_delta: Callable[[CompletionDelta], None] | None = None
) -> tuple[int, ...]:
    request = SampleRequest(model=fleet.base, prompt=(1, 2), params=GREEDY, on_delta=on_delta)
    [[completion]] = await fleet.sample([request])
    return completion.tokens


def another_root(stub: Stub) -> None:
    stub.root = "other"


def another_name(stub: Stub) -> None:
    stub.model = "other"


def other_weights(stub: Stub) -> None:
    stub.weights = "other"


OTHERS = {
    "root": (another_root, "served tiny as tiny, and serves other as tiny now", 2.0),
    "name": (another_name, "served tiny as tiny, and serves tiny as other now", None),
    "weights": (other_weights, "with other weights than tiny had", 2.0),
}


@pytest.mark.parametrize(("change", "said", "started_s"), OTHERS.values(), ids=OTHERS)
async def test_a_server_started_again_on_another_model_is_not_used(
    change: Callable[[Stub], None], said: str, started_s: float | None
) -> None:
    first = None if started_s is None else 1.0
    stub, other = Stub(started_s=first), Stub(started_s=first)
    async with serve(stub, other):
        config = FleetConfig(urls=(stub.url, other.url), all_down_timeout_s=0.5)
        async with open_fleet(config) as fleet:
            right = await sample(fleet)
            replica = fleet.pool.replicas[0]
            await stub.stop()
            replica.attention.set()
            await until(lambda: replica.breaker.is_open)
            change(stub)
            stub.started_s = started_s
            await stub.start()
            await until(lambda: said in replica.last_error)
            num_served = stub.num_served
            assert {await sample(fleet) for _ in range(8)} == {right}, "the other one goes on"
            assert stub.num_served == num_served
            await other.stop()
            with pytest.raises(FleetDownError, match=said):
                await sample(fleet)
            stub.model, stub.root, stub.weights = "tiny", "tiny", ""
            await until(lambda: replica.load.is_open)
            assert await sample(fleet) == right, "it is back on its model"
            await other.start()


@dataclass
class PlainStub(Stub):
    """Reads no texts unless told so, and tells one token of each position or more."""

    reads_texts: bool = False
    most: int = 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_text = isinstance(body["prompt"][0], str)
        if (is_text and not self.reads_texts) or body.get("logprobs", 0) > self.most:
            return web.json_response({"error": {"message": "as asked"}}, status=400)
        return await super()._complete(request)


async def test_a_server_that_tells_little_is_recognised_by_that() -> None:
    async with serve(PlainStub()) as [stub]:
        config = FleetConfig(urls=(stub.url,), all_down_timeout_s=0.3)
        async with open_fleet(config) as fleet:
            [replica] = fleet.pool.replicas
            stub.started_s, stub.weights = 2.0, "other"
            replica.attention.set()
            await until(lambda: "with other weights" in replica.last_error)
            stub.weights = ""
            await until(lambda: replica.load.is_open)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_of_another_server_behind_the_address_does_not_count(
    *, is_streamed: bool
) -> None:
    """No connection broke: only the answer itself tells."""
    on_delta = (lambda _: None) if is_streamed else None
    async with serve(Stub(system="a")) as [stub]:
        config = FleetConfig(urls=(stub.url,), all_down_timeout_s=0.3)
        async with open_fleet(config) as fleet:
            right = await sample(fleet, on_delta)
            stub.started_s, stub.system, stub.weights = 2.0, "b", "other"
            with pytest.raises(FleetError, match="with other weights"):
                await sample(fleet, on_delta)
            stub.weights = ""
            await until(lambda: fleet.pool.replicas[0].load.is_open)
            assert await sample(fleet, on_delta) == right
            stub.started_s, stub.system = 3.0, "c"
            assert await sample(fleet, on_delta) == right, "the same model, with other flags"
            num_bodies = len(stub.bodies)
            for _ in range(5):
                await sample(fleet, on_delta)
            assert len(stub.bodies) == num_bodies + 5, "nothing is asked beside calls"


@dataclass
class TrainedStub(Stub):
    """Notes which name its weights had when they were changed."""

    routes: tuple[str, ...] = ROUTES
    names: list[str] = field(default_factory=list)
    hangs_update: bool = False

    async def _call_workers(self, request: web.Request) -> web.Response:
        self.names.append(self.version_name)
        if self.hangs_update:
            await asyncio.get_running_loop().create_future()  # until the client is gone
        return await super()._call_workers(request)

    async def _tell_weights(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0.1 if self.hangs_update else 0)  # what hangs was slow before
        return await super()._tell_weights(request)


def fleet_of(stub: Stub) -> FleetConfig:
    return FleetConfig(urls=(stub.url,), all_down_timeout_s=1)


def dead_mark() -> WeightsMark:
    """Of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return replace(WeightsMark.made_here("step-3"), pid=process.pid)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["ends", "is stopped"])
async def test_a_program_leaves_the_weights_that_it_found(*, is_stopped: bool) -> None:
    async with serve(TrainedStub()) as [stub]:
        assert isinstance(stub, TrainedStub)
        async with open_fleet(fleet_of(stub)) as fleet:
            first = await sample(fleet)
        try:
            async with open_fleet(fleet_of(stub)) as fleet:
                await update_weights(fleet, Model("new"))
                version = fleet.base.version
                assert (stub.weights, stub.version_name) == ("new", version)
                if is_stopped:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert (stub.weights, stub.weight_version) == ("", "default")
        assert stub.names == [version, version], "marked before any weight changes"
        async with open_fleet(fleet_of(stub)) as fleet:
            assert await sample(fleet) == first
        assert len(stub.names) == 2, "nothing is loaded that is there"


async def test_weights_that_a_killed_program_left_are_replaced() -> None:
    async with serve(TrainedStub()) as [stub]:
        async with open_fleet(fleet_of(stub)) as fleet:
            first = await sample(fleet)
        stub.weights, stub.weight_version = "half", str(dead_mark())
        async with open_fleet(fleet_of(stub)) as fleet:
            assert await sample(fleet) == first
        assert (stub.weights, stub.weight_version) == ("", "default")


@pytest.mark.parametrize("where", ["this", "another"])
async def test_weights_in_training_are_refused(where: str) -> None:
    mark = replace(WeightsMark.made_here("step-3"), pid=1, start="")
    if where == "another":
        mark = replace(dead_mark(), machine="elsewhere")
    else:
        mark = replace(mark, pid=os.getppid(), start=process_start(os.getppid()))
    async with serve(TrainedStub(weights="half", weight_version=str(mark))) as [stub]:
        with pytest.raises(FleetError, match=rf"step-3 of a training by .* of {where} machine"):
            async with open_fleet(fleet_of(stub)):
                pass
        assert (stub.weights, stub.version_name) == ("half", "step-3"), "left as they are"
        await restore(stub.url)
        assert (stub.weights, stub.weight_version) == ("", "default")


async def test_a_second_fleet_of_the_training_program_is_refused_while_it_trains() -> None:
    mark = str(WeightsMark.made_here("step-3"))
    async with serve(TrainedStub(weights="half", weight_version=mark)) as [stub]:
        lock = TrainerLock.take(stub.url)
        assert lock is not None
        with pytest.raises(FleetError, match="of a training by process"):
            async with open_fleet(fleet_of(stub)):
                pass
        lock.release()
        async with open_fleet(fleet_of(stub)):
            assert stub.weights == ""


async def test_weights_named_by_other_programs_are_theirs() -> None:
    async with serve(TrainedStub(weights="theirs", weight_version="v7")) as [stub]:
        async with open_fleet(fleet_of(stub)) as fleet:
            await sample(fleet)
        assert (stub.weights, stub.weight_version) == ("theirs", "v7")


@pytest.mark.parametrize("is_refused", [True, False], ids=["refuses", "hangs"])
async def test_a_server_that_keeps_trained_weights_keeps_their_name(
    caplog: pytest.LogCaptureFixture, *, is_refused: bool
) -> None:
    async with serve(TrainedStub()) as [stub]:
        assert isinstance(stub, TrainedStub)
        config = fleet_of(stub).model_copy(update={"client": ClientConfig(control_s=0.5)})
        async with open_fleet(config) as fleet:
            await update_weights(fleet, Model("new"))
            version = fleet.base.version
            stub.refuse_update, stub.hangs_update = is_refused, not is_refused
        assert (stub.weights, stub.version_name) == ("new", version)
        assert is_refused or "refuse it: it takes longer than control_s" in caplog.text
        assert f"rookery fleet restore {stub.url}" in caplog.text
        with pytest.raises(FleetError):
            async with open_fleet(config):
                pass


def others_mark() -> str:
    """Of another process, which is alive."""
    pid = os.getppid()
    return str(replace(WeightsMark.made_here("theirs"), pid=pid, start=process_start(pid)))


async def test_weights_of_another_training_are_not_overwritten() -> None:
    """Two programs were open before either had changed a weight."""
    async with serve(TrainedStub()) as [stub]:
        async with open_fleet(fleet_of(stub)) as fleet:
            stub.weights, stub.weight_version = "theirs", others_mark()
            with pytest.raises(FleetError, match="theirs of a training by process"):
                await update_weights(fleet, Model("new"))
        assert (stub.weights, stub.version_name) == ("theirs", "theirs")


async def test_weights_of_another_training_are_not_replaced_at_the_end() -> None:
    async with serve(TrainedStub()) as [stub]:
        async with open_fleet(fleet_of(stub)) as fleet:
            await update_weights(fleet, Model("new"))
            await restore(stub.url)
            stub.weights, stub.weight_version = "theirs", others_mark()
        assert (stub.weights, stub.version_name) == ("theirs", "theirs")


async def test_a_program_that_is_open_asks_nothing_of_weights_in_training() -> None:
    async with serve(TrainedStub()) as [stub], open_fleet(fleet_of(stub)) as fleet:
        [replica] = fleet.pool.replicas
        right = await sample(fleet)
        stub.weights, stub.weight_version = "theirs", others_mark()
        replica.attention.set()
        await until(lambda: not replica.load.is_open)
        with pytest.raises(FleetDownError, match="theirs of a training by process"):
            await sample(fleet)
        stub.weights, stub.weight_version = "", "default"
        await until(lambda: replica.load.is_open)
        assert await sample(fleet) == right


async def test_an_answer_of_the_first_weights_is_none_of_the_newest() -> None:
    """A server that was started again, with other flags, between two calls."""
    async with serve(TrainedStub(system="a")) as [stub], open_fleet(fleet_of(stub)) as fleet:
        await update_weights(fleet, Model("new"))
        stub.started_s, stub.system, stub.weights = 2.0, "b", ""
        stub.weight_version = "default"
        with pytest.raises(FleetError, match="was started again"):
            await sample(fleet)


@dataclass
class SlowStub(TrainedStub):
    """Its first load of weights takes until `go`."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _call_workers(self, request: web.Request) -> web.Response:
        if not self.names:
            self.names.append("begun")
            await self.go.wait()
        return await super()._call_workers(request)


async def test_weights_are_given_back_before_a_next_training() -> None:
    """Two programs find what a killed one left."""
    async with serve(SlowStub(weights="half", weight_version=str(dead_mark()))) as [stub]:
        assert isinstance(stub, SlowStub)

        async def evaluate() -> None:
            async with open_fleet(fleet_of(stub)):
                pass

        reading = asyncio.create_task(evaluate())
        await until(lambda: stub.names)
        assert is_trained(stub.url), "no training begins meanwhile"
        stub.go.set()
        await reading
        assert (stub.weights, stub.weight_version) == ("", "default")
        assert not is_trained(stub.url)
