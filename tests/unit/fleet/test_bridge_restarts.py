"""Servers that are started again while weights are trained: none answers for weights it has not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet.adapters import make_small, write_model
from fleet.sharing import (
    SHAPES,
    SharingStub,
    ask,
    expected,
    first_weights,
    fleet_of,
    said_of,
    training,
)
from fleet.stub import Stub, logprobs_after, serve, until

from rookery.errors import FleetError
from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.fleet.bridges.adapter import AdapterBridge, CopyBridge
from rookery.fleet.bridges.update import Canary
from rookery.types import Adapter, ModelRef, ModelWeights


async def test_a_server_that_is_started_again_computes_with_the_memory_that_is_there() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        ref = await trainer.step()
        replica = fleet.pool.replicas[1]
        await stubs[1].stop()
        await ask(fleet, ref)
        fleet.pool.suspect(replica, "as asked")
        await until(lambda: not replica.load.is_open)
        stubs[1].restart()
        await stubs[1].start()
        await until(lambda: replica.load.is_open)
        assert said_of(stubs[1].tensors) == said_of(trainer.weights)
        await trainer.step()


async def test_a_server_that_is_started_again_stays_out_when_it_cannot_get_the_weights() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        await trainer.step()
        replica = fleet.pool.replicas[1]
        await stubs[1].stop()
        fleet.pool.suspect(replica, "as asked")
        stubs[1].restart()
        stubs[1].refusal = "its weights are quantised (fp8)"
        await stubs[1].start()
        await until(lambda: "quantised" in replica.excluded)
        assert not replica.load.is_open


async def test_a_server_that_was_started_again_unnoticed_gets_the_newest_weights() -> None:
    """No call was lost: only its metrics show it."""
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        ref = await trainer.step()
        [replica] = fleet.pool.replicas
        stub.restart()
        replica.attention.set()
        await until(lambda: said_of(stub.tensors) == said_of(trainer.weights))
        await until(lambda: replica.load.is_open)
        row = logprobs_after("tiny" + said_of(trainer.weights), (1, 2))
        assert await ask(fleet, ref) == row.index(max(row))


async def test_a_server_that_is_started_again_is_not_given_weights_before_their_time() -> None:
    """Newer ones are on their way by `copy`, and wait for the requests in flight."""
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet:
        bridge = CopyBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))

        async def publish(value: float) -> ModelRef:
            tensors = {name: torch.full(shape, value) for name, shape in SHAPES.items()}

            async def logprobs(canary: Canary) -> Sequence[float]:
                return expected(tensors, canary)

            weights = ModelWeights(name="policy", tensors=tensors, version=str(value))
            return await bridge.replace_base(weights, logprobs)

        await publish(1.0)
        first, [replica] = said_of(stub.tensors), fleet.pool.replicas
        async with fleet.updating():
            publishing = asyncio.create_task(publish(2.0))
            stub.restart()
            replica.attention.set()
            await until(lambda: said_of(stub.tensors) != said_of(first_weights()))
            assert said_of(stub.tensors) == first
            await until(lambda: replica.load.is_open)
        assert await publishing == fleet.base
        assert said_of(stub.tensors) != first


@pytest.mark.parametrize("moment", ["before", "inside"])
async def test_a_server_that_is_down_while_weights_are_published_gets_them_when_it_is_back(
    moment: str,
) -> None:
    """The only one: the training goes on, and who asks meanwhile waits for it."""
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        [replica] = fleet.pool.replicas
        if moment == "before":
            await stub.stop()
        ref = ModelRef(name="policy", version="newest")
        async with trainer.bridge.changing_base() as rename:
            if moment == "inside":
                await stub.stop()
            for tensor in trainer.weights.values():
                tensor += 0.5
            rename(ref)
        assert fleet.base == ref and not replica.load.is_open
        waiting = asyncio.create_task(ask(fleet, ref))
        stub.restart()
        await stub.start()
        row = logprobs_after("tiny" + said_of(trainer.weights), (1, 2))
        assert await waiting == row.index(max(row))
        assert said_of(stub.tensors) == said_of(trainer.weights)
        assert await ask(fleet, await trainer.step())


async def test_a_server_that_is_there_and_fails_stops_the_training() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        stub.fails_resume = True
        with pytest.raises(FleetError, match="1 of 1 servers did not get the new weights"):
            await trainer.step()


async def test_a_call_that_is_sent_again_is_not_answered_by_other_weights() -> None:
    stubs = [SharingStub(hang=True), SharingStub(hang=True)]
    for stub in stubs:
        stub.hang = False
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        first = await trainer.step()
        for stub in stubs:
            stub.hang = True
        asked = asyncio.create_task(ask(fleet, first))
        await until(lambda: any(stub.in_flight["tiny"] for stub in stubs))
        for stub in stubs:
            stub.hang = False
        await trainer.step()
        [holder] = [stub for stub in stubs if stub.in_flight["tiny"]]
        await holder.stop()
        with pytest.raises(FleetError, match="policy@step-1 was replaced by policy@step-2"):
            await asked
        assert fleet.pool.num_resent == 1
        await holder.start()


class ForgetfulStub(Stub):
    """Computes with another base model once it was started again."""

    def _choice(self, body: dict[str, Any], prompt: list[int], sample: int) -> dict[str, Any]:
        other = "" if self.started_s == 1.0 else "other "
        return super()._choice({**body, "model": other + body["model"]}, prompt, sample)


class Publishing:
    """An adapter in training on stub servers, which answer by its name."""

    def __init__(self, fleet: Fleet) -> None:
        canary = Canary.of(fleet.capabilities, is_float32=True)
        self.bridge = AdapterBridge(fleet, canary=canary, logprobs=self._logprobs)
        self._newest: Adapter | None = None

    async def publish(self, seed: int) -> ModelRef:
        self._newest = make_small("policy", seed)
        return await self.bridge.publish(self._newest)

    async def _logprobs(self, canary: Canary) -> Sequence[float]:
        assert self._newest is not None
        name = f"policy@{self._newest.version}"
        row = logprobs_after(name, canary.tokens)
        return [row[token] for token in canary.ids]


async def test_a_restarted_server_shows_the_newest_adapter_before_it_takes_calls(
    tmp_path: Path,
) -> None:
    root = str(write_model(tmp_path / "tiny"))
    stub = Stub(root=root)
    config = FleetConfig(urls=(await started(stub),), all_down_timeout_s=5, name="tiny")
    async with open_fleet(config) as fleet:
        publishing, [replica] = Publishing(fleet), fleet.pool.replicas
        await publishing.publish(1)
        ref = await publishing.publish(2)
        stub.adapters.clear()
        stub.started_s = 2.0
        num_bodies = len(stub.bodies)
        replica.attention.set()
        await until(lambda: len(stub.bodies) > num_bodies + 1 and replica.load.is_open)
        asked = {body["model"].rpartition("~")[0] for body in stub.bodies[num_bodies:]}
        assert asked == {"", ref.served_name}, "the base model and the adapter"
        assert await ask(fleet, ref)
    await stub.stop()


async def test_a_restarted_server_that_computes_otherwise_stays_out(tmp_path: Path) -> None:
    root = str(write_model(tmp_path / "tiny"))
    stub = ForgetfulStub(root=root)
    config = FleetConfig(urls=(await started(stub),), all_down_timeout_s=5, name="tiny")
    async with open_fleet(config) as fleet:
        publishing, [replica] = Publishing(fleet), fleet.pool.replicas
        await publishing.publish(1)
        stub.adapters.clear()
        stub.started_s = 2.0
        replica.attention.set()
        await until(lambda: "started again with other weights" in replica.last_error)
        assert not replica.load.is_open and stub.url in replica.last_error
    await stub.stop()


async def started(stub: Stub) -> str:
    await stub.start()
    return stub.url
