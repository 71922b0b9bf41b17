"""Connections within the file descriptors that a process may have."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from marks import long

from rookery.fleet.http.client import WANTED, connection_limit

HERE = Path(__file__).parent
CROWD = """
import asyncio, json, resource, sys
from fleet.stub import Stub, serve
from rookery.fleet import FleetConfig, open_fleet
from rookery.types import SampleRequest, SamplingParams

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

async def main():
    stubs = [Stub(latency_s=0.02) for _ in range(2)]
    async with serve(*stubs):
        config = FleetConfig(urls=tuple(stub.url for stub in stubs), max_in_flight=8192)
        async with open_fleet(config) as fleet:
            wanted = [
                SampleRequest(model=fleet.base, prompt=(1, i % 50),
                              params=SamplingParams(max_tokens=1, seed=i))
                for i in range(NUM)
            ]
            answers = await fleet.sample(wanted)
            print(json.dumps([len(answers), fleet.pool.num_resent]))

asyncio.run(main())
"""


@pytest.mark.parametrize("num", [600, pytest.param(10_000, marks=long)])
def test_more_requests_in_flight_than_descriptors(num: int) -> None:
    """The servers are in the same process: every connection takes two."""
    path = [str(HERE.parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n" + CROWD.replace("NUM", str(num))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [num, 0]


def test_the_limit_is_raised_as_far_as_allowed_and_half_of_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [1024, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    assert WANTED // 2 - 1000 < connection_limit() < WANTED // 2
    assert limits[0] == WANTED
    limits[:] = [256, 1024]
    assert 256 < connection_limit() < 512 and limits == [1024, 1024]
    limits[:] = [10 * WANTED, 10 * WANTED]
    assert connection_limit() > WANTED and limits[0] == 10 * WANTED
