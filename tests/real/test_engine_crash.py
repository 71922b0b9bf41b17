"""One real vLLM server on the CPU whose engine process is killed: its requests wait. Minutes.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_engine_crash.py
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rookery.embedded import resolve_model
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.types import SampleRequest, SamplingParams

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(1200),
]
NUM = 32


def _engine_of(pid: int) -> int:
    """The child process that computes."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if fields["PPid"] == str(pid) and "Engine" in fields["Name"]:
            return int(fields["Pid"])
    raise AssertionError("the server has no engine process")


async def test_requests_of_one_server_outlive_its_engine() -> None:
    launch = LaunchConfig(
        model=str(resolve_model("smollm2").path),
        python=PYTHON,
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_loras=0,
        cpu_cache_gib=1,
        enforce_eager=True,
        env={"HF_HUB_OFFLINE": "1"},
    )
    async with open_fleet(FleetConfig(launch=launch, all_down_timeout_s=600)) as fleet:
        [replica] = fleet.pool.replicas
        assert replica.local is not None
        wanted = [
            SampleRequest(
                model=fleet.base,
                prompt=(1, 2, 3 + i),
                params=SamplingParams(max_tokens=64, seed=i, ignore_eos=True),
            )
            for i in range(NUM)
        ]
        caller = asyncio.create_task(fleet.sample(wanted))
        async with asyncio.timeout(60):
            while replica.load.num_sequences < NUM:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        os.kill(_engine_of(replica.local.pid), signal.SIGKILL)
        answers = await caller
        assert all(len(completion.tokens) == 64 for [completion] in answers)
        assert fleet.pool.num_resent > 0 and replica.local.num_restarts == 1
