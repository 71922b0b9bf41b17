"""Servers given by URL: where the base model and adapters must not be computed together."""

from typing import Literal

import pytest
from fleet.adapters import make_small
from fleet.stub import Stub, serve

from rookery.fleet import FleetConfig, open_fleet
from rookery.types import SampleRequest, SamplingParams

NO_INFO = tuple(route for route in Stub().routes if route != "/server_info")


@pytest.mark.parametrize(
    ("stub", "device", "may_meet"),
    [
        (Stub(device="cuda"), None, True),
        (Stub(device="cpu"), None, False),
        (Stub(routes=NO_INFO), None, False),
        (Stub(routes=NO_INFO), "gpu", True),
        (Stub(device="cpu"), "gpu", False),
        (Stub(routes=NO_INFO, version="0.26.0+cu129"), None, True),
        (Stub(routes=NO_INFO, version="0.26.0+cpu"), None, False),
        (Stub(routes=NO_INFO, version="0.26.0+g1234567"), None, False),
        (Stub(routes=NO_INFO, cpu_space="None"), None, True),
        (Stub(routes=NO_INFO, cpu_space="4294967296"), "gpu", False),
    ],
    ids=[
        "gpu", "cpu", "not told", "by the config", "the server knows better", "gpu build",
        "cpu build", "some build", "no cpu cache", "cpu cache",
    ],
)  # fmt: skip
async def test_the_base_and_adapters_take_turns_unless_on_a_gpu(
    stub: Stub, device: Literal["gpu", "cpu"] | None, may_meet: bool
) -> None:
    stub.latency_s = 0.02
    async with (
        serve(stub),
        open_fleet(FleetConfig(urls=(stub.url,), batch=1, device=device)) as fleet,
    ):
        ref = await fleet.load(make_small("a"))
        await fleet.sample(
            [
                SampleRequest(model=model, prompt=(1, i), params=SamplingParams(max_tokens=1))
                for i in range(8)
                for model in (fleet.base, ref)
            ]
        )
    assert stub.has_met == may_meet
