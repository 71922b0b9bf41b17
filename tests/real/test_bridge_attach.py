"""Trainers that come and go beside a server of `rookery fleet up` that stays, and servers that come
back as others.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fleet.stub import until
from tests.real.peers import needs_vllm, served_on_cpu
from tiny import write_tiny_model

from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.types import ScoreRequest

TRAINER = Path(__file__).with_name("attached_trainer.py")
SHARED = Path(__file__).parents[1] / "unit"
pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
NEAR = 1e-4
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Server:
    """One that is up, and how long it took to be."""

    url: str
    start_s: float


@contextmanager
def fleet_up(config: Path) -> Iterator[Server]:
    began_s = time.monotonic()
    words = [sys.executable, "-m", "rookery", "fleet", "up", str(config)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = next(line for line in process.stdout if line.startswith("http"))
            yield Server(first.split()[0], time.monotonic() - began_s)
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()


@dataclass
class Client:
    """Asks a server for the base model all the time, whoever trains it."""

    session: aiohttp.ClientSession
    model: str
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        body = {"model": self.model, "prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True}
        while True:
            async with self.session.post("/v1/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200 or answer["usage"]["completion_tokens"] != 16:
                self.failures.append(f"{response.status}: {answer}")
            self.num_answered += 1


@asynccontextmanager
async def asking(url: str, model: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url) as session:
        client = Client(session, model)
        task = asyncio.create_task(client.run())
        try:
            yield client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def train(server: Server, model: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of a trainer, and what it said."""
    path = os.pathsep.join([str(SHARED), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(TRAINER), server.url, str(model), str(model.parent), *words,
        env={**os.environ, "PYTHONPATH": path}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in said.splitlines()]


async def test_a_trainer_attaches_where_another_was_killed(tmp_path: Path) -> None:
    """It was killed while the server was paused: who asked waits, and is answered."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    model = write_tiny_model(tmp_path / "model", **sizes)
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    config = write_config(tmp_path, model, max_model_len=256, live_weights=True)
    with fleet_up(config) as server:
        async with asking(server.url, str(model)) as client:
            status, said = await train(server, model, "3", "killed")
            assert status == -signal.SIGKILL and [s.get("step") for s in said] == [None, 0, 1]
            num_answered = client.num_answered
            assert num_answered > 0
            status, said = await train(server, model, "2")
        assert status == 0 and [s.get("step") for s in said] == [None, 0, 1]
        assert all(line["gap"] < NEAR for line in said)
        assert not client.failures and client.num_answered > num_answered
        assert said[0]["attached_s"] <= 0.1 * server.start_s, (server, said)
        assert said[0]["private_bytes"] < 0.05 * num_bytes, (num_bytes, said)


SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 64, which vLLM computes on every CPU."""


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    launch = served_on_cpu(model, **{"max_model_len": 128, "max_loras": 0, **changes})
    config = folder / "fleet.yaml"
    config.write_text(json.dumps({"launch": launch}))
    return config


async def read(fleet: Fleet) -> Sequence[float]:
    request = ScoreRequest(model=fleet.base, tokens=(5, 6, 7), start=3, labels=(8, 9, 10))
    [score] = await fleet.score([request])
    return score.label_logprobs


async def test_another_model_under_the_same_name_is_not_used(tmp_path: Path) -> None:
    """The folder has the same name too."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    flags = {"port": 18930, "args": ["--served-model-name", "policy"]}
    config = write_config(tmp_path, model, **flags)
    with fleet_up(config) as server:
        url = server.url
        opening = open_fleet(FleetConfig(urls=(url,), all_down_timeout_s=600))
        fleet = await opening.__aenter__()
        first = await read(fleet)
    try:
        [replica] = fleet.pool.replicas
        await until(lambda: replica.breaker.is_open)
        shutil.rmtree(model)
        write_tiny_model(model, **SIZES, intermediate_size=128)
        with fleet_up(config) as server:
            assert server.url == url
            await until(lambda: "with other weights" in replica.last_error, 60)
            assert not replica.load.is_open and first
    finally:
        await opening.__aexit__(None, None, None)


async def test_a_training_leaves_the_base_model_to_the_next(tmp_path: Path) -> None:
    """It ends, or is killed."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    with fleet_up(write_config(tmp_path, model, live_weights=True)) as server:
        config = FleetConfig(urls=(server.url,))
        async with open_fleet(config) as fleet:
            first = await read(fleet)
        for words, expected in ([], 0), (["killed"], -signal.SIGKILL):
            status, said = await train(server, model, "3", *words)
            assert status == expected and said[1]["step"] == 0
            async with open_fleet(config) as fleet:
                assert await read(fleet) == pytest.approx(first, abs=NEAR)
        status, said = await train(server, model, "2")
        assert status == 0 and all(line["gap"] < NEAR for line in said)
