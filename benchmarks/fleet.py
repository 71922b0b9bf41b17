"""Cost of the fleet, and how well it spreads work over stub servers. Two minutes, no GPU.

    python benchmarks/fleet.py [--openai-python PYTHON]

Client: CPU time per request of the fleet, of its bare client and of the `openai` package (of this
or of another interpreter), 128 in flight, the same server in the same run. Spread: 8 servers of
fixed latency, all alike and with one five times slower. Population: 32 adapters on 8 slots.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rookery.fleet import Client, Fleet, FleetConfig, open_fleet, open_session
from rookery.fleet.fleet import OBJECTS
from rookery.fleet.http.wire import Fields, encode_body
from rookery.types import Adapter, ModelRef, SampleRequest, SamplingParams

HERE = Path(__file__).parent
LAYER = "model.layers.0.self_attn.q_proj"
IN_FLIGHT = 128
NUM = 4000
OWN = gc.get_threshold()[0]
"""New objects between two garbage collections in Python's default setting."""
OPENAI = """
import asyncio, gc, json, sys, time
import openai
url, num, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gc.set_threshold(int(sys.argv[4]))
async def main():
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    left = iter(range(num))
    async def work():
        for i in left:
            answer = await client.completions.create(
                model="stub", prompt=[1, 2, 3], max_tokens=16, temperature=1.0, logprobs=0, seed=i)
            assert len(answer.choices[0].logprobs.token_logprobs) == 16
    await asyncio.gather(*[work() for _ in range(in_flight)])
    left = iter(range(num))
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[work() for _ in range(in_flight)])
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
asyncio.run(main())
"""


@contextmanager
def stubs(*settings: dict[str, Any]) -> Iterator[list[str]]:
    """Run stub servers in another process; yields their URLs."""
    command = [sys.executable, str(HERE / "fleet_stub.py"), json.dumps(settings)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        ports = json.loads(process.stdout.readline())
        yield [f"http://127.0.0.1:{port}" for port in ports]
        process.stdin.close()


@asynccontextmanager
async def fleet_of(urls: list[str], **options: Any) -> AsyncIterator[Fleet]:
    async with open_fleet(FleetConfig(urls=tuple(urls), **options)) as fleet:
        yield fleet


def requests(ref: ModelRef, num: int) -> list[SampleRequest]:
    return [
        SampleRequest(model=ref, prompt=(1, 2, 3), params=SamplingParams(max_tokens=16, seed=seed))
        for seed in range(num)
    ]


async def measure(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - wall, time.process_time() - cpu


async def bare_client(url: str) -> tuple[float, float]:
    async with open_session() as session:
        client = Client(url, session=session)

        async def work() -> None:
            left = iter(range(NUM))

            async def one() -> None:
                for seed in left:
                    fields = Fields(max_tokens=16, temperature=1.0, seed=seed)
                    answer = await client.complete(encode_body("stub", fields, [(1, 2, 3)]))
                    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 16

            await asyncio.gather(*[one() for _ in range(IN_FLIGHT)])

        await work()
        return await measure(work)


async def whole_fleet(url: str, *, threshold: int = OBJECTS) -> tuple[float, float]:
    """Measure the fleet with this threshold of the garbage collector."""
    async with fleet_of([url], max_in_flight=IN_FLIGHT) as fleet:
        gc.set_threshold(threshold)
        await fleet.sample(requests(fleet.base, 500))
        return await measure(lambda: fleet.sample(requests(fleet.base, NUM)))


def openai_package(url: str, python: str) -> tuple[float, float] | None:
    num = NUM // 8
    run = subprocess.run(
        [python, "-c", OPENAI, url, str(num), str(IN_FLIGHT), str(OBJECTS)],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        print("openai package: not run:", run.stderr.strip().splitlines()[-1:])
        return None
    wall, cpu = json.loads(run.stdout)
    return wall * NUM / num, cpu * NUM / num


async def client_cost(python: str) -> dict[str, float]:
    with stubs({}) as [url]:
        rows = {"fleet.sample": await whole_fleet(url), "fleet client": await bare_client(url)}
        theirs = openai_package(url, python)
        if theirs is not None:
            rows["openai package"] = theirs
        rows["fleet.sample again"] = await whole_fleet(url)
        rows["with Python's own garbage collection"] = await whole_fleet(url, threshold=OWN)
    print(f"\n{'client, 128 in flight':38}{'req/s':>10}{'CPU ms/req':>12}{'req/s/core':>12}")
    for name, (wall, cpu) in rows.items():
        print(f"{name:38}{NUM / wall:10.0f}{cpu / NUM * 1e3:12.3f}{NUM / cpu:12.0f}")
    found = {f"{name} req/s/core": NUM / cpu for name, (_, cpu) in rows.items()}
    if theirs is not None:
        ours = min(rows["fleet.sample"][1], rows["fleet.sample again"][1])
        found["fleet over openai"] = theirs[1] / ours
        found["client over openai"] = theirs[1] / rows["fleet client"][1]
        print(f"fleet.sample / openai: {found['fleet over openai']:.1f}x per core; "
              f"bare client: {found['client over openai']:.1f}x")  # fmt: skip
    return found


async def spread(slow: float) -> float:
    latency, capacity, num = 0.25, 8, 8 * 8 * 24
    servers = [{"latency_s": latency, "capacity": capacity} for _ in range(8)]
    servers[0]["latency_s"] = latency * slow
    with stubs(*servers) as urls:
        async with fleet_of(urls, max_in_flight=2 * capacity) as fleet:
            wall, _ = await measure(lambda: fleet.sample(requests(fleet.base, num)))
            stolen = fleet.pool.num_stolen
    ideal = num / (7 * capacity / latency + capacity / (latency * slow))
    print(f"8 servers, one {slow:g}x slower: {wall:.2f} s of {ideal:.2f} s, "
          f"efficiency {ideal / wall:.1%}, {stolen} calls taken over")  # fmt: skip
    return ideal / wall


async def population() -> dict[str, float]:
    latency, capacity, load, num_prompts = 0.5, 32, 0.03, 8
    adapters = [Adapter(name=f"a{i}", base="", factors=_factors(), version="1") for i in range(32)]
    settings = {"latency_s": latency, "capacity": capacity, "load_s": load, "max_loras": 8}
    with model_folder() as root, stubs({**settings, "root": root}) as [url]:
        async with fleet_of([url], max_in_flight=64, batch=1) as fleet:
            refs = [await fleet.load(adapter) for adapter in adapters]
            wanted = [r for ref in refs for r in requests(ref, num_prompts)]
            wall, _ = await measure(lambda: fleet.sample(wanted))
            stats = await fleet.pool.replicas[0].client.get("/stats")
    best = len(wanted) / capacity * latency
    print(f"32 adapters x {num_prompts} prompts on 8 slots: {wall:.2f} s, best order {best:.2f} s "
          f"(+{wall / best - 1:.1%}), most loads of one adapter "
          f"{max(stats['loads'].values())}, most adapters at once {stats['most']}")  # fmt: skip
    return {"population over best": wall / best}


@contextmanager
def model_folder() -> Iterator[str]:
    """Folder with the tensor shapes of a model; with them, the fleet loads adapters only on use."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "config.json").write_text("{}")
        save_file({f"{LAYER}.weight": np.zeros((4, 4), np.float32)}, Path(root, "m.safetensors"))
        yield root


def _factors() -> dict[str, Any]:
    import torch

    from rookery.types import LoraFactors

    return {LAYER: LoraFactors(a=torch.ones(2, 4), b=torch.ones(4, 2), scale=1.0)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    own = sys.executable if importlib.util.find_spec("openai") else ""
    parser.add_argument(
        "--openai-python", default=own or os.environ.get("ROOKERY_VLLM_PYTHON", sys.executable)
    )
    options = parser.parse_args()
    found = await client_cost(options.openai_python)
    found["efficiency"] = await spread(1)
    found["efficiency, one slow"] = await spread(5)
    found |= await population()
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    asyncio.run(main())
