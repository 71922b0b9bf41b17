"""A real model behind the service: cost of durability, kills, and sampling over HTTP.

    python benchmarks/tink_served.py          # SmolLM2; about eight minutes on two cores

| measured | how |
|---|---|
| journal | share of a training's step time spent waiting for the journal |
| disk | the service's folder while it trains, relative to the snapshots in it |
| kills | a training with a service that is killed five times: the adapter is bitwise equal |
| tokens/s | 64 samples of 48 tokens through the service, relative to the engine itself |
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rookery.compose.serve import ServeConfig, open_backend, serving
from rookery.embedded import EngineConfig
from rookery.remote import ServiceClient, ServiceClientConfig, open_client
from rookery.service.config import ServiceConfig
from rookery.service.state import Wal
from rookery.service.work import Backend
from rookery.train import TrainerConfig
from rookery.types import (
    Datum,
    LoraShape,
    OptimStep,
    SampleRequest,
    SamplingParams,
    TrainRequest,
)

MODEL = "smollm2"
NUM_STEPS, STEP_TOKENS, NUM_DATA = 12, 64, 4
KILLED_AFTER = (1, 3, 5, 8, 10)
MOST_JOURNAL, MOST_DISK, LEAST_RATE = 0.05, 2.0, 0.9
NUM_SAMPLES, SAMPLE_TOKENS, ROUNDS = 64, 48, 3
START_S = 300.0


def step_request(step: int) -> TrainRequest:
    """Request of one step; its data depends only on the step."""
    rows = []
    for row in range(NUM_DATA):
        ids = [(7 + 31 * step + 17 * row + 13 * place) % 4000 for place in range(STEP_TOKENS + 1)]
        rows.append(
            Datum(
                tokens=tuple(ids[:-1]),
                positions=tuple(range(STEP_TOKENS)),
                targets=tuple(ids[1:]),
                weights=(1.0,) * STEP_TOKENS,
            )
        )
    return TrainRequest(trainee="pupil", data=tuple(rows))


async def train(client: ServiceClient, *, on_step: Callable[[int], Any] = lambda _: None) -> None:
    await client.trainer.create("pupil", LoraShape(rank=8, seed=1))
    for step in range(NUM_STEPS):
        [output] = await client.trainer.forward_backward([step_request(step)])
        [stepped] = await client.trainer.optim_step(
            [OptimStep(trainee="pupil", learning_rate=1e-3)]
        )
        assert not output.error and not stepped.error, (output.error, stepped.error)
        done = on_step(step)
        if asyncio.iscoroutine(done):
            await done


@asynccontextmanager
async def service(
    folder: Path, backend: Backend, config: ServiceConfig
) -> AsyncIterator[ServiceClient]:
    settings = ServeConfig(port=0, anonymous=True, folder=folder, service=config)
    async with (
        serving(settings, backends={MODEL: backend}) as url,
        open_client(ServiceClientConfig(url=url)) as client,
    ):
        yield client


class JournalClock:
    """Context that sums the seconds until journal entries are durable."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._append = Wal.append

    def __enter__(self) -> "JournalClock":
        clock, append = self, self._append

        def timed(wal: Wal, header: Any, body: bytes = b"") -> "asyncio.Future[list[int]]":
            started = time.perf_counter()
            future = append(wal, header, body)
            future.add_done_callback(lambda _: clock.add(time.perf_counter() - started))
            return future

        Wal.append = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Wal.append = self._append  # type: ignore[method-assign]

    def add(self, seconds: float) -> None:
        self.seconds += seconds


def folder_bytes(folder: Path) -> int:
    """Bytes in the folder now; files may appear and vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


async def measure_durability(scratch: Path, backend: Backend) -> bool:
    """Measure journal and disk, with far more snapshots than a service takes."""
    folder, sizes = scratch / "durable", list[int]()
    config = ServiceConfig(snapshot_s=5.0)
    async with service(folder, backend, config) as client:
        with JournalClock() as clock:
            started = time.perf_counter()
            await train(client, on_step=lambda _: sizes.append(folder_bytes(folder)))
            seconds = time.perf_counter() - started
        snapshot = scratch / "state"
        await backend.trainer.save(_only(backend), snapshot)
        one = snapshot.stat().st_size
    share, disk = clock.seconds / seconds, statistics.median(sizes) / one
    is_quick, is_small = share <= MOST_JOURNAL, disk <= MOST_DISK
    print(f"journal  {share:6.1%} of the steps   {'ok' if is_quick else 'TOO SLOW'}")
    print(
        f"disk     {disk:.2f}x of the snapshot ({one / 2**20:.0f} MiB), {max(sizes) / one:.2f}x "
        f"while a new one is written   {'ok' if is_small else 'TOO LARGE'}"
    )
    return is_quick and is_small


def _only(backend: Backend) -> str:
    """Name of the only trainee in the trainer."""
    names: Sequence[str] = tuple(backend.trainer.trainees)  # type: ignore[attr-defined]
    return names[0]


class Process:
    """`rookery serve` in a process that can be killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._config = folder / "serve.yaml"
        document = {
            "port": self._port,
            "anonymous": True,
            "models": {MODEL: MODEL},
            "folder": str(folder / "run"),
        }
        self._config.write_text(json.dumps(document))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rookery", "serve", str(self._config),
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def trained_files(folder: Path, killed_after: Sequence[int]) -> bytes:
    """Files of the adapter after a training whose service is killed after these steps."""
    process = Process(folder)
    await process.start()
    try:
        config = ServiceClientConfig(url=process.url, away_s=START_S)
        async with open_client(config) as client:

            async def stepped(step: int) -> None:
                if step in killed_after:
                    await process.kill()
                    await process.start()

            await train(client, on_step=stepped)
            await client.trainer.export("pupil", folder / "adapter")
    finally:
        await process.kill()
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


async def measure_kills(scratch: Path) -> bool:
    whole = await trained_files(scratch / "whole", ())
    killed = await trained_files(scratch / "killed", KILLED_AFTER)
    is_equal = whole == killed
    print(
        f"kills    {len(KILLED_AFTER)} in {NUM_STEPS} steps, the adapter is "
        f"{'bit-equal   ok' if is_equal else 'DIFFERENT'}"
    )
    return is_equal


async def measure_rate(scratch: Path, backend: Backend) -> bool:
    requests = [
        SampleRequest(
            model=backend.engine.base,
            prompt=tuple(5 + (place * 7 + index) % 80 for place in range(16)),
            params=SamplingParams(max_tokens=SAMPLE_TOKENS, ignore_eos=True, seed=index),
        )
        for index in range(NUM_SAMPLES)
    ]
    seconds: dict[str, list[float]] = {"engine": [], "service": []}
    config = ServiceConfig(samples_in_flight=NUM_SAMPLES)
    async with service(scratch / "rate", backend, config) as client:
        for _ in range(ROUNDS + 1):
            for name, engine in (("engine", backend.engine), ("service", client.engine)):
                started = time.perf_counter()
                await engine.sample(requests)
                seconds[name].append(time.perf_counter() - started)
    rates = {
        name: NUM_SAMPLES * SAMPLE_TOKENS / statistics.median(own[1:])
        for name, own in seconds.items()
    }
    ratio = rates["service"] / rates["engine"]
    is_good = ratio >= LEAST_RATE
    print(
        f"tokens/s {rates['service']:.0f} served, {rates['engine']:.0f} by the engine, "
        f"{ratio:.2f}x   {'ok' if is_good else 'TOO SLOW'}"
    )
    return is_good


async def main() -> bool:
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as name:
        scratch = Path(name)
        engine = EngineConfig(model=MODEL)
        async with open_backend(
            MODEL, engine=engine, trainer=TrainerConfig(), alpha=32.0
        ) as backend:
            is_durable = await measure_durability(scratch, backend)
            is_quick = await measure_rate(scratch, backend)
        is_exact = await measure_kills(scratch)
    return is_durable and is_quick and is_exact


if __name__ == "__main__":
    raise SystemExit(not asyncio.run(main()))
