"""The service's own cost: latency beside thousands of waiting requests, and fairness.

    python benchmarks/tink_queue.py          # a stub for the model; about two minutes

2,000 samples wait, each with an open poll, and the journal is on. Submissions of another tenant
(gradients of 64 tokens) and heartbeats are timed one after another, without and with this load.
Then one tenant queues 1,000 requests, and another one sends a request of the same size.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import aiohttp
from tink_stub import BLOCKED, NAME, stub_service

from rookery.remote.records import train_document
from rookery.service.keys import add_key
from rookery.types import Datum, TrainRequest

NUM_WAITING, NUM_TIMED, NUM_QUEUED, NUM_LATE = 2000, 500, 1000, 7
SUBMIT_S, HEARTBEAT_S = 0.050, 0.020
MOST_TIMES, MOST_WAIT = 3.0, 2.0
REQUEST_S = 0.5
"""Seconds that one request of the fairness measurement takes alone."""
NUM_TOKENS = 64


@dataclass
class Api:
    """HTTP client of one tenant."""

    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(f"{self.url}/api/v1/{path}", json=body) as response:
            document: dict[str, Any] = await response.json() if response.status != 204 else {}
            if response.status not in (200, 204, 408):
                raise RuntimeError(f"{path}: {response.status} {document}")
            return {**document, "status": response.status}

    async def result(self, request_id: str) -> dict[str, Any]:
        while True:
            answer = await self.post("retrieve_future", {"request_id": request_id})
            if answer["status"] == 200:
                return answer

    async def sampler(self) -> str:
        session = (await self.post("create_session", {}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        return str((await self.post("create_sampling_session", body))["sampling_session_id"])

    async def model(self) -> tuple[str, str]:
        session = (await self.post("create_session", {}))["session_id"]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": NAME,
            "lora_config": {"rank": 8, "seed": 0},
        }
        reply = await self.post("create_model", body)
        await self.result(reply["request_id"])
        return str(session), str(reply["model_id"])

    async def train(self, model: str, seq: int, tokens: int) -> str:
        datum = Datum(
            tokens=(5,) * tokens,
            positions=tuple(range(tokens)),
            targets=(6,) * tokens,
            weights=(1.0,) * tokens,
        )
        request = TrainRequest(trainee=model, data=(datum,))
        body = train_document(model, seq, request, forward_only=False)
        return str((await self.post("forward_backward", body))["request_id"])


@asynccontextmanager
async def tenant(url: str, key: str) -> AsyncIterator[Api]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    headers = {"x-api-key": key}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:
        yield Api(http, url)


def hold_waiting(url: str, key: str, ready: Event) -> None:
    """Entry point of a process that sends samples that are never answered, and polls for each."""

    async def run() -> None:
        async with tenant(url, key) as api:
            sampler = await api.sampler()
            sent = asyncio.Semaphore(64)

            async def send(seq: int) -> str:
                body = {
                    "sampling_session_id": sampler,
                    "seq_id": seq,
                    "prompt": {"chunks": [{"tokens": [BLOCKED, 5, 6]}]},
                    "sampling_params": {"max_tokens": 8},
                }
                async with sent:
                    return str((await api.post("asample", body))["request_id"])

            waiting = await asyncio.gather(*(send(seq) for seq in range(NUM_WAITING)))
            polls = [asyncio.create_task(api.result(one)) for one in waiting]
            await asyncio.sleep(5.0)  # until the service holds all of them
            ready.set()
            await asyncio.gather(*polls)

    asyncio.run(run())


async def timed(call: Callable[[int], Awaitable[object]]) -> float:
    """99th percentile of the latency in seconds."""
    seconds = []
    for number in range(1, NUM_TIMED + 1):
        started = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - started)
    return statistics.quantiles(seconds, n=100)[98]


async def latencies(api: Api) -> dict[str, float]:
    session, model = await api.model()
    return {
        "submit": await timed(lambda seq: api.train(model, seq, NUM_TOKENS)),
        "heartbeat": await timed(lambda _: api.post("session_heartbeat", {"session_id": session})),
    }


async def measure_waiting(scratch: Path) -> bool:
    keys = scratch / "keys.json"
    ada, bob = add_key(keys, name="ada"), add_key(keys, name="bob")
    spawn = multiprocessing.get_context("spawn")
    async with stub_service(scratch / "run", keys=keys) as url, tenant(url, bob) as api:
        await latencies(api)  # warm up imports and connections
        alone = await latencies(api)
        ready = spawn.Event()
        holder = spawn.Process(target=hold_waiting, args=(url, ada, ready), daemon=True)
        holder.start()
        try:
            if not await asyncio.to_thread(ready.wait, 120.0):
                raise RuntimeError("the waiting requests were not accepted")
            beside = await latencies(api)
        finally:
            holder.kill()
            holder.join()
    is_fine = True
    for name, most_s in (("submit", SUBMIT_S), ("heartbeat", HEARTBEAT_S)):
        ratio = beside[name] / alone[name]
        is_good = beside[name] < most_s and ratio <= MOST_TIMES
        is_fine &= is_good
        print(
            f"{name:10} p99 {1e3 * alone[name]:6.1f} ms alone, {1e3 * beside[name]:6.1f} ms beside "
            f"{NUM_WAITING} that wait, {ratio:.2f}x   {'ok' if is_good else 'TOO SLOW'}"
        )
    return is_fine


async def waits(api: Api) -> list[float]:
    """Seconds from sending a request to its result, for requests one after another."""
    _, model = await api.model()
    seconds = []
    for seq in range(1, NUM_LATE + 1):
        started = time.perf_counter()
        await api.result(await api.train(model, seq, NUM_TOKENS))
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


async def measure_fairness(scratch: Path) -> bool:
    keys = scratch / "keys.json"
    ada, bob = add_key(keys, name="ada"), add_key(keys, name="bob")
    pace = REQUEST_S / NUM_TOKENS
    async with (
        stub_service(scratch / "run", keys=keys, seconds_per_token=pace) as url,
        tenant(url, ada) as many,
        tenant(url, bob) as one,
    ):
        alone = await waits(one)
        _, model = await many.model()
        for seq in range(1, NUM_QUEUED + 1):
            await many.train(model, seq, NUM_TOKENS)
        beside = await waits(one)
    ratio = statistics.mean(beside) / statistics.mean(alone)
    is_good = ratio <= MOST_WAIT
    print(
        f"one request waits {statistics.mean(alone):.2f} s alone, {statistics.mean(beside):.2f} s "
        f"beside {NUM_QUEUED} of another tenant, {ratio:.2f}x (longest {max(beside):.2f} s)   "
        f"{'ok' if is_good else 'TOO LONG'}"
    )
    return is_good


async def main() -> bool:
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as scratch:
        is_quick = await measure_waiting(Path(scratch) / "waiting")
        is_fair = await measure_fairness(Path(scratch) / "fair")
    return is_quick and is_fair


if __name__ == "__main__":
    raise SystemExit(not asyncio.run(main()))
