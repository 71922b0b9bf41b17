"""What a canary asks, what it takes for rounding, and what it costs a publication."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web
from fleet.adapters import make_small, write_model
from fleet.sharing import SharingStub, ask, fleet_of, training
from fleet.stub import Stub, logprobs_after, serve, until

from rookery.errors import FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges.adapter import AdapterBridge
from rookery.fleet.bridges.update import Canary
from rookery.fleet.http.client import ClientConfig
from rookery.types import ModelRef

PLAIN = (-1.0, -2.0, -30.0)
EXACT = Canary(tokens=(1, 2, 3), ids=(1, 2, 3), limit_nats=1e-3)
HALF = Canary(tokens=(1, 2, 3), ids=(1, 2, 3), limit_nats=0.1)


@pytest.mark.parametrize(
    ("canary", "found", "is_far"),
    [
        (EXACT, PLAIN, False),
        (EXACT, (-1.0, -2.002, -30.0), True),
        (HALF, (-1.09, -2.0, -30.0), False),
        (HALF, (-1.11, -2.0, -30.0), True),
        (HALF, (-1.0, -2.0, -30.37), False),
        (HALF, (-1.0, -2.0, -30.38), True),
        (HALF, (math.nan, -2.0, -30.0), True),
        (HALF, (-1.0, math.inf, -30.0), True),
    ],
)
def test_rounding_is_in_proportion_to_what_is_rounded(
    canary: Canary, found: Sequence[float], is_far: bool
) -> None:
    assert canary.is_far(found, PLAIN) is is_far


def test_in_half_precision_a_few_tokens_may_be_far_off() -> None:
    """As SmolLM2 in bfloat16 on a server and in the trainer: one token of nine by a nat."""
    canary = Canary(tokens=(1,), ids=(1, 2, 3, 4, 5), limit_nats=0.1, num_spared=2)
    plain = (-2.0,) * 5
    assert not canary.is_far((-3.0, math.nan, -2.0, -2.0, -2.0), plain)
    assert canary.is_far((-3.0, math.nan, -2.2, -2.0, -2.0), plain)


@pytest.mark.parametrize("vocab_size", [10, 96, 151_936])
async def test_text_and_ids_are_spread_over_the_vocabulary(vocab_size: int) -> None:
    async with serve(stub := SharingStub()), open_fleet(fleet_of(stub)) as fleet:
        canary = Canary.of(fleet.capabilities, is_float32=False, vocab_size=vocab_size)
    assert len(set(canary.ids)) == len(canary.ids)
    assert min(*canary.tokens, *canary.ids) > 0
    assert vocab_size * 0.8 < max(*canary.tokens, *canary.ids) < vocab_size


async def test_a_publication_asks_one_prompt_for_one_token() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        num_bodies = len(stub.bodies)
        await trainer.step()
        [body] = stub.bodies[num_bodies:]
        [prompt] = body["prompt"]
        assert len(prompt) > 2 * stub.block and body["max_tokens"] == 1


async def test_a_change_that_takes_longer_than_a_request_may_is_proved_all_the_same() -> None:
    stub = SharingStub()
    async with serve(stub):
        config = fleet_of(stub).model_copy(update={"client": ClientConfig(request_s=0.2)})
        async with open_fleet(config) as fleet, training(fleet) as trainer:
            num_bodies = len(stub.bodies)
            async with trainer.bridge.changing_base() as rename:
                await until(lambda: len(stub.bodies) > num_bodies)
                await until(lambda: not any(stub.in_flight.values()))
                rename(ModelRef(name="policy", version="later"))
            assert await ask(fleet, ModelRef(name="policy", version="later"))


async def test_a_change_that_fails_leaves_nothing_at_the_server() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        with pytest.raises(RuntimeError, match="as asked"):
            async with trainer.bridge.changing_base():
                await stub.wait_in_flight(1)
                raise RuntimeError("as asked")
        await until(lambda: not any(stub.in_flight.values()))
        assert await ask(fleet, await trainer.step())


async def test_a_change_that_is_cancelled_while_servers_pause_resumes_them() -> None:
    stubs = slow, quick = SharingStub(pause_s=30.0), SharingStub()
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        changing = asyncio.create_task(trainer.step())
        await until(lambda: slow.num_pauses and quick.num_pauses)
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert not slow.is_paused and not quick.is_paused


async def test_the_version_before_is_refused_at_once_and_leaves_meanwhile(tmp_path: Path) -> None:
    stub = Stub(root=str(write_model(tmp_path / "tiny")))
    async with serve(stub):
        config = FleetConfig(urls=(stub.url,), all_down_timeout_s=5, name="tiny")
        async with open_fleet(config) as fleet:
            newest = make_small("policy", 0)

            async def logprobs(canary: Canary) -> Sequence[float]:
                row = logprobs_after(f"policy@{newest.version}", canary.tokens)
                return [row[token] for token in canary.ids]

            canary = Canary.of(fleet.capabilities, is_float32=True)
            bridge = AdapterBridge(fleet, canary=canary, logprobs=logprobs)
            refs = []
            for seed in range(3):
                newest = make_small("policy", seed)
                refs.append(await bridge.publish(newest))
                assert fleet.loaded == (refs[-1],)
                for old in refs[:-1]:
                    with pytest.raises(FleetError, match="is not loaded"):
                        await ask(fleet, old)
            await until(lambda: len(stub.adapters) == 1)


async def test_adapters_of_several_names_are_published_side_by_side(tmp_path: Path) -> None:
    stub = Stub(root=str(write_model(tmp_path / "tiny")), latency_s=0.3)
    async with serve(stub):
        config = FleetConfig(urls=(stub.url,), all_down_timeout_s=5, name="tiny")
        async with open_fleet(config) as fleet:
            bridge = AdapterBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))

            async def publish(name: str, seed: int) -> ModelRef:
                adapter = make_small(name, seed)

                async def logprobs(canary: Canary) -> Sequence[float]:
                    row = logprobs_after(f"{name}@{adapter.version}", canary.tokens)
                    return [row[token] for token in canary.ids]

                return await bridge.publish_with(adapter, logprobs)

            for seed in range(3):
                refs = await asyncio.gather(*(publish(f"policy-{i}", seed) for i in range(3)))
                assert set(fleet.loaded) == set(refs)
            assert stub.most_adapters == 3, "all canaries are read at the same time"
            await until(lambda: len(stub.adapters) == 3)
            stub.adapters.clear()
            stub.started_s = 2.0
            [replica], num_bodies = fleet.pool.replicas, len(stub.bodies)
            replica.attention.set()
            await until(lambda: len(stub.bodies) > num_bodies + 3 and replica.load.is_open)
            asked = {body["model"].rpartition("~")[0] for body in stub.bodies[num_bodies:]}
            assert asked == {"", *(ref.served_name for ref in refs)}, "it shows all of them"


class _SlowUnload(Stub):
    async def _unload(self, request: web.Request) -> web.Response:
        self.is_unloading.set()
        await self.may_unload.wait()
        return await super()._unload(request)

    async def start(self) -> None:
        self.is_unloading, self.may_unload = asyncio.Event(), asyncio.Event()
        await super().start()


async def test_a_publication_that_is_cancelled_twice_leaves_no_adapter(tmp_path: Path) -> None:
    """As by a second Ctrl-C, while the server is told to forget it."""
    stub = _SlowUnload(root=str(write_model(tmp_path / "tiny")))

    async def logprobs(canary: Canary) -> Sequence[float]:
        return [0.0] * len(canary.ids)

    async with (
        serve(stub),
        open_fleet(FleetConfig(urls=(stub.url,), all_down_timeout_s=5, name="tiny")) as fleet,
    ):
        canary = Canary.of(fleet.capabilities, is_float32=True)
        bridge = AdapterBridge(fleet, canary=canary, logprobs=logprobs)
        stub.hang = True
        publishing = asyncio.create_task(bridge.publish(make_small("policy", 0)))
        await stub.wait_in_flight(1)
        publishing.cancel()
        await stub.is_unloading.wait()
        stub.hang = False
        publishing.cancel()
        done, _ = await asyncio.wait({publishing}, timeout=0.1)
        assert not done, "it waits for the server"
        stub.may_unload.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not stub.adapters and not fleet.loaded
