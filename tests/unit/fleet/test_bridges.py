"""Weights published to stub servers: proved, or the fault is named."""

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
import torch
from fleet.sharing import (
    ROUTES,
    SHAPES,
    SharingStub,
    ask,
    expected,
    first_weights,
    fleet_of,
    said_of,
    training,
)
from fleet.stub import logprobs_after, serve

from rookery.errors import FleetError
from rookery.fleet import open_fleet
from rookery.fleet.bridges.adapter import CopyBridge
from rookery.fleet.bridges.alias import SharedBase, share_base
from rookery.fleet.bridges.canary import Canary
from rookery.fleet.bridges.merge import MergeBridge
from rookery.fleet.routing.paused import VERSION
from rookery.types import Adapter, LoraFactors, ModelRef, ModelWeights


async def test_all_servers_compute_with_the_memory_of_the_trainer() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        for _ in range(5):
            ref = await trainer.step()
            assert fleet.base == ref
            assert {stub.version_name for stub in stubs} == {ref.version}
            row = logprobs_after("tiny" + said_of(trainer.weights), (1, 2))
            assert await ask(fleet, ref) == row.index(max(row))
        sums = {said_of(stub.tensors) for stub in stubs}
        assert sums == {said_of(trainer.weights)} != {said_of(first_weights())}
        assert all(stub.num_pauses == 5 for stub in stubs)


async def test_clean_publishes_raise_no_alarm() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        for _ in range(30):
            await trainer.step()
        assert stub.num_pauses == 30


async def test_what_is_in_flight_is_kept_while_weights_change() -> None:
    stub = SharingStub(latency_s=0.05)
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        first = await trainer.step()
        asked = asyncio.create_task(ask(fleet, first))
        await stub.wait_in_flight(1)
        await trainer.step()
        await asked
        with pytest.raises(FleetError, match="step-1 is not loaded"):
            await ask(fleet, first)


FAULTS = {
    "keys and values cached for older weights": {"keeps_prefixes": True},
    "keeps the old output layer": {"packed_copy": "lm_head.weight"},
}


@pytest.mark.parametrize("said", FAULTS)
async def test_the_canary_stops_a_server_that_computes_with_older_weights(said: str) -> None:
    stub = SharingStub(**FAULTS[said])  # type: ignore[arg-type]
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        with pytest.raises(FleetError, match=said) as raised:
            for _ in range(2):
                await trainer.step()
        assert stub.url in str(raised.value)
        assert not fleet.pool.replicas[0].load.is_open


async def test_a_weight_that_is_no_alias_is_named() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        stub.tensors["lm_head.weight"] = stub.tensors["lm_head.weight"].clone()
        with pytest.raises(FleetError, match=r"first weight that differs is lm_head\.weight"):
            await trainer.step()


async def test_a_publication_that_is_cancelled_twice_leaves_no_server_paused() -> None:
    """As by a second Ctrl-C, while the server is told to go on."""
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        is_changing = asyncio.Event()

        async def publish() -> None:
            async with trainer.bridge.changing_base():
                is_changing.set()
                await asyncio.Event().wait()

        publishing = asyncio.create_task(publish())
        await is_changing.wait()
        for _ in range(2):
            publishing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not stub.is_paused


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (SharingStub(refusal="its weights are quantised (fp8)"), "quantised .*bridge: copy"),
        (SharingStub(routes=("/v1/completions",)), "does not share its weights"),
    ],
)
async def test_servers_that_cannot_share_say_why(stub: SharingStub, said: str) -> None:
    if "/collective_rpc" not in stub.routes:
        stub.refusal = "no extension"
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet:
        with pytest.raises(FleetError, match=said):
            await share_base(fleet)


async def test_weights_are_copied_to_servers_and_proved() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet:
        bridge = CopyBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))
        for step in range(3):
            tensors = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}

            async def logprobs(
                canary: Canary, tensors: dict[str, torch.Tensor] = tensors
            ) -> Sequence[float]:
                return expected(tensors, canary)

            weights = ModelWeights(name="policy", tensors=tensors, version=str(step))
            ref = await bridge.replace_base(weights, logprobs)
            assert ref == fleet.base == ModelRef(name="policy", version=str(step))
            assert {said_of(stub.tensors) for stub in stubs} == {said_of(tensors)}
        stubs[0].ignores_loads = True
        tensors["lm_head.weight"] += 1
        weights = ModelWeights(name="policy", tensors=tensors, version="last")
        with pytest.raises(FleetError, match=rf"1 of 2 servers .*{stubs[0].url}"):
            await bridge.replace_base(weights, logprobs)


async def test_prefixes_are_forgotten_while_others_have_requests_in_flight() -> None:
    """They are not waited for, and a server forgets nothing that runs unless it is told to."""
    stub = SharingStub(routes=tuple(route for route in ROUTES if route != VERSION))
    async with (
        serve(stub),
        open_fleet(fleet_of(stub)) as fleet,
        aiohttp.ClientSession(stub.url) as session,
    ):
        bridge = CopyBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))

        async def publish(value: float) -> None:
            tensors = {name: torch.full(shape, value) for name, shape in SHAPES.items()}

            async def logprobs(canary: Canary) -> Sequence[float]:
                return expected(tensors, canary)

            weights = ModelWeights(name="policy", tensors=tensors, version=str(value))
            await bridge.replace_base(weights, logprobs)

        await publish(1.0)
        stub.latency_s = 60.0
        asking = asyncio.create_task(session.post("/v1/completions", json={"model": "tiny"}))
        await stub.wait_in_flight(1)
        stub.latency_s = 0.0
        await publish(2.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def test_the_memory_of_a_server_that_died_is_not_opened() -> None:
    gone = {"packed": {}, "path": "/proc/4194305/fd/3", "bytes": 256, "tensors": {}}
    with pytest.raises(FleetError, match=r"weights cannot be opened here.*bridge: copy"):
        SharedBase(gone)


LAYERS = [name.removesuffix(".weight") for name in SHAPES if name != "lm_head.weight"]


def merging_adapter(version: str, *layers: str) -> Adapter:
    factors = {
        layer: LoraFactors(a=torch.full((1, 3), 2.0), b=torch.full((2, 1), 0.25), scale=0.5)
        for layer in layers
    }
    return Adapter(name="policy", base="", factors=factors, version=version)


async def test_an_adapter_is_added_to_the_weights_of_the_servers() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet:
        shared = await share_base(fleet)
        served = {layer: shared.find(SHAPES)[f"{layer}.weight"] for layer in LAYERS}
        base = {layer: weight.clone() for layer, weight in served.items()}
        canary = Canary.of(fleet.capabilities, is_float32=True)
        wrong: list[float] = []

        async def logprobs(adapter: Adapter) -> Sequence[float]:
            merged = {
                f"{layer}.weight": weight + 0.25 * (layer in adapter.factors)
                for layer, weight in base.items()
            }
            whole = merged | {"lm_head.weight": torch.ones(3)}
            return wrong or expected(whole, canary)

        bridge = MergeBridge(
            fleet, shared, base=base, served=served, canary=canary, logprobs=logprobs
        )
        served[LAYERS[0]] += 1  # of a run that was killed
        for layers in ([LAYERS[1]], LAYERS[:2], []):
            adapter = merging_adapter(f"step-{len(layers)}", *layers)
            ref = await bridge.publish(adapter)
            assert fleet.base == ref == ModelRef(name="policy", version=adapter.version)
            for layer in LAYERS:
                assert torch.equal(served[layer], base[layer] + 0.25 * (layer in layers))
            await ask(fleet, ref)
        wrong[:] = [-1.0] * len(canary.ids)
        with pytest.raises(FleetError, match="took the new weights but computes with others"):
            await bridge.publish(merging_adapter("step-9", *LAYERS))
