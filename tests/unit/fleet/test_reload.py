"""New base weights on stub servers: a new version, or no requests."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fleet.adapters import make_small
from fleet.stub import VOCABULARY, Stub, logprobs_after, serve, until
from forked import forked, run_code

from rookery.errors import FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges.reload import update_weights
from rookery.types import ModelRef, SampleRequest, SamplingParams

ROUTES = (*Stub().routes, "/collective_rpc")
KILLED = """
import asyncio, pathlib, sys, time
from fleet.test_reload import Model
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges.reload import update_weights

class Slow(Model):
    def save_pretrained(self, folder):
        (folder / "part").write_text("x")
        print("saving", flush=True)
        time.sleep(60)

async def main():
    config = FleetConfig(urls=(sys.argv[1],), adapter_folder=pathlib.Path(sys.argv[2]))
    async with open_fleet(config) as fleet:
        await update_weights(fleet, Slow("new"))

asyncio.run(main())
"""
PARAMS = SamplingParams(max_tokens=1, temperature=0)


class Model(torch.nn.Module):
    """Says what a stub with these weights says, unless it is trained at the moment."""

    def __init__(self, weights: str) -> None:
        super().__init__()
        self.weights = weights
        self.one = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Dropout().eval()

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        row = tokens[0].tolist()
        after = [logprobs_after("tiny" + self.weights, row[: i + 1]) for i in range(len(row))]
        if self.training:
            after = [[0.0] * VOCABULARY for _ in after]
        return SimpleNamespace(logits=torch.tensor([after]))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text(self.weights)


def ask(ref: ModelRef, num: int = 1) -> list[SampleRequest]:
    return [SampleRequest(model=ref, prompt=(1, 2, i), params=PARAMS) for i in range(num)]


async def test_new_weights_are_a_new_version_that_every_server_has() -> None:
    stubs = [Stub(routes=ROUTES), Stub(routes=ROUTES)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        first = fleet.base
        model = Model("new").train()
        model.frozen.eval()
        assert await update_weights(fleet, model) < 1e-5
        assert model.training and not model.frozen.training, "as it was, part by part"
        assert {stub.weights for stub in stubs} == {"new"}
        assert fleet.base.name == "base" and fleet.base.version.startswith("tiny+")
        with pytest.raises(FleetError, match=r"base@tiny is not loaded. Loaded: base@tiny\+"):
            await fleet.sample(ask(first))
        [[completion]] = await fleet.sample(ask(fleet.base))
        row = logprobs_after("tinynew", (1, 2, 0))
        assert completion.tokens == (row.index(max(row)),) and completion.model == fleet.base
        newer = fleet.base
        await update_weights(fleet, Model("newest"))
        again = fleet.base
        await update_weights(fleet, Model("new"))
        assert fleet.base == newer != again, "the same weights are the same version"
        await fleet.load(replace(make_small("a"), base=fleet.base.version))


async def test_an_update_that_is_cancelled_while_saving_leaves_nothing(tmp_path: Path) -> None:
    is_saving, may_go_on = threading.Event(), threading.Event()

    class Slow(Model):
        def save_pretrained(self, folder: Path) -> None:
            (folder / "part").write_text("x")
            is_saving.set()
            may_go_on.wait(10)
            super().save_pretrained(folder)

    stub = Stub(routes=ROUTES)
    async with serve(stub):
        config = FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)
        async with open_fleet(config) as fleet:
            before = os.listdir(tmp_path)
            update = asyncio.create_task(update_weights(fleet, Slow("new")))
            await asyncio.to_thread(is_saving.wait)
            assert len(os.listdir(tmp_path)) == 2, "under a folder with a record of its own"
            update.cancel()
            await asyncio.sleep(0)
            update.cancel()
            may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert os.listdir(tmp_path) == before


async def test_an_update_that_is_killed_is_cleared_by_the_next_fleet(tmp_path: Path) -> None:
    stub = Stub(routes=ROUTES)
    async with serve(stub):
        with forked(run_code, KILLED, stub.url, str(tmp_path)) as killed:
            assert await asyncio.to_thread(killed.lines.readline) == "saving\n"
            killed.send(signal.SIGKILL)
            await asyncio.to_thread(killed.wait)
        assert len(os.listdir(tmp_path)) == 2
        async with open_fleet(FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)):
            assert len(os.listdir(tmp_path)) == 1


async def test_requests_before_an_update_are_answered_by_the_old_weights_alone() -> None:
    stub = Stub(routes=ROUTES, latency_s=0.05)
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        first = fleet.base
        before = asyncio.create_task(fleet.sample(ask(first, 4)))
        await stub.wait_in_flight(1)
        update = asyncio.create_task(update_weights(fleet, Model("new")))
        answers = await before
        assert all(c.model == first for [c] in answers) and not update.done()
        for request, [completion] in zip(ask(first, 4), answers, strict=True):
            row = logprobs_after("tiny", request.prompt)
            assert completion.tokens == (row.index(max(row)),)
        await update


async def test_a_server_whose_update_failed_takes_no_requests() -> None:
    stubs = [Stub(routes=ROUTES), Stub(routes=ROUTES, refuse_update=True)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        with pytest.raises(FleetError, match=r"1 of 2 servers did not get .* the others go on"):
            await update_weights(fleet, Model("new"))
        assert [replica.load.is_open for replica in fleet.pool.replicas] == [True, False]
        stubs[1].bodies.clear()
        await fleet.sample(ask(fleet.base, 20))
        assert not stubs[1].bodies
        stubs[1].refuse_update = False
        await update_weights(fleet, Model("newer"))
        assert all(replica.load.is_open for replica in fleet.pool.replicas)


async def test_a_server_of_another_machine_needs_a_folder_that_both_see(tmp_path: Path) -> None:
    stub = Stub(routes=ROUTES)
    async with serve(stub):
        elsewhere = stub.url.replace("127.0.0.1", "0.0.0.0")  # this machine under another address
        config = FleetConfig(urls=(elsewhere,))
        async with open_fleet(config) as fleet:
            with pytest.raises(FleetError, match="VLLM_ADAPTER_FOLDER"):
                await update_weights(fleet, Model("new"))
        assert stub.weights != "new"
        shared = config.model_copy(update={"adapter_folder": tmp_path})
        async with open_fleet(shared) as fleet:
            await update_weights(fleet, Model("new"))
        assert stub.weights == "new"


async def test_weights_that_did_not_arrive_are_noticed_and_keep_the_server_out() -> None:
    stub = Stub(routes=ROUTES)
    async with (
        serve(stub),
        open_fleet(FleetConfig(urls=(stub.url,), all_down_timeout_s=0.1)) as fleet,
    ):
        first, model = fleet.base, Model("new")
        model.save_pretrained = Model("other").save_pretrained  # type: ignore[method-assign]
        with pytest.raises(FleetError, match=r"no server takes requests: .*computes with others"):
            await update_weights(fleet, model)
        assert fleet.base == first
        with pytest.raises(FleetError, match="computes with others"):
            await fleet.sample(ask(first))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16")])
async def test_a_server_of_float32_is_judged_by_float32(dtypes: tuple[str, ...]) -> None:
    """What half precision rounds by are other weights where all is float32, as servers tell."""
    stubs = [Stub(routes=ROUTES, dtype=dtype, logprobs_off=0.01) for dtype in dtypes]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        if "bfloat16" in dtypes:
            await update_weights(fleet, Model("new"))
            return
        await update_weights(fleet, Model("new").to(torch.bfloat16))
        with pytest.raises(FleetError, match=r"off by 0.01 nats, more than 0.001"):
            await update_weights(fleet, Model("newer"))


@pytest.mark.parametrize("started_s", [2.0, None])
async def test_a_server_that_was_started_again_does_not_rejoin_with_old_weights(
    started_s: float | None,
) -> None:
    stubs = [Stub(routes=ROUTES), Stub(routes=ROUTES)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        await update_weights(fleet, Model("new"))
        replica = fleet.pool.replicas[1]
        # The connection breaks and the process goes on: it still has the weights.
        await stubs[1].stop()
        await fleet.sample(ask(fleet.base, 20))
        await until(lambda: not replica.load.is_open)
        await stubs[1].start()
        await until(lambda: replica.load.is_open)
        await stubs[1].stop()
        await fleet.sample(ask(fleet.base, 20))
        await until(lambda: not replica.load.is_open)
        stubs[1].weights, stubs[1].started_s = "", started_s
        await stubs[1].start()
        await until(lambda: not replica.breaker.is_open)
        assert not replica.load.is_open and "may have the weights it began with" in replica.excluded
        stubs[1].started_s = 3.0
        await update_weights(fleet, Model("newer"))
        assert replica.load.is_open
