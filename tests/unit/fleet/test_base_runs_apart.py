"""Servers given by URL: where the base model and adapters must not be computed together."""

import pytest
from fleet.adapters import make_small
from fleet.stub import Stub, serve

from rookery.fleet import FleetConfig, open_fleet
from rookery.types import SampleRequest, SamplingParams

NO_INFO = tuple(route for route in Stub().routes if route != "/server_info")


@pytest.mark.parametrize(
    ("stub", "may_meet"),
    [
        (Stub(device="cuda"), True),
        (Stub(device="cpu"), False),
        (Stub(routes=NO_INFO), False),
    ],
    ids=["gpu", "cpu", "device not told"],
)
async def test_the_base_and_adapters_take_turns_unless_on_a_gpu(stub: Stub, may_meet: bool) -> None:
    stub.latency_s = 0.02
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,), batch=1)) as fleet:
        ref = await fleet.load(make_small("a"))
        await fleet.sample(
            [
                SampleRequest(model=model, prompt=(1, i), params=SamplingParams(max_tokens=1))
                for i in range(8)
                for model in (fleet.base, ref)
            ]
        )
    assert stub.has_met == may_meet


async def test_a_cpu_server_by_url_is_known_as_one() -> None:
    async with serve(Stub(device="cpu")) as [stub], open_fleet(FleetConfig(urls=(stub.url,))) as f:
        assert f.capabilities.is_on_cpu and not f.capabilities.has_prompt_logprobs
