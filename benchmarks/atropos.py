"""Groups per second from environments to a trainer: Rookery's gateway beside Atropos' `run-api`.

    ROOKERY_ATROPOS_PYTHON=PYTHON python benchmarks/atropos.py      # about a minute

ROOKERY_ATROPOS_PYTHON names a Python that has atroposlib 0.4. Eight clients send groups of 8
sequences of 256 tokens, gzipped as atroposlib does, and one client takes batches of 8 groups. A
group counts once the trainer has it. The two servers take turns for several rounds, each in its own
process. The gateway writes a group to disk before it responds.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

NUM_CLIENTS = 8
GROUP_SIZE = 8
NUM_TOKENS = 256
GROUPS_PER_BATCH = 8
VOCAB_SIZE = 32_000
START_S = 60.0
PATIENCE_S = 120.0
"""Limit on one measurement, in seconds."""
REGISTRATION = {
    "wandb_group": "benchmark", "wandb_project": "benchmark", "checkpoint_dir": "",
    "batch_size": GROUPS_PER_BATCH * GROUP_SIZE, "max_token_len": NUM_TOKENS,
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**6,
}  # fmt: skip
ENVIRONMENT = {
    "max_token_length": NUM_TOKENS, "desired_name": "benchmark", "weight": 1.0,
    "group_size": GROUP_SIZE,
}  # fmt: skip


async def main(python: str, *, num_groups: int, rounds: int) -> None:
    names = ("gateway", "run-api")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder, serving(name, python, folder) as url:
                rates[name].append(await measure(url, num_groups))
    print(f"{'':<10} {'groups/s':>9}   {num_groups} groups, of {rounds} rounds")
    for name, found in rates.items():
        shown = ", ".join(f"{rate:.1f}" for rate in found)
        print(f"{name:<10} {median(found):>9.1f}   {shown}")


@contextmanager
def serving(name: str, python: str, folder: str) -> Iterator[str]:
    """Run a server inside the block; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    if name == "gateway":
        config = Path(folder, "gateway.yaml")
        config.write_text(f"port: {port}\nvocab_size: {VOCAB_SIZE}\nfolder: groups\n")
        words = [sys.executable, "-m", "rookery", "grpo", "gateway", str(config)]
    else:
        words = [str(Path(python).with_name("run-api")), "--host", "127.0.0.1", "--port", str(port)]
    silent = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=silent, stderr=silent) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def measure(url: str, num_groups: int) -> float:
    """Groups per second that arrive at a trainer."""
    limits = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(url, timeout=limits) as session:
        await wait_for(session)
        await ask(session, "POST", "/register", REGISTRATION)
        await ask(session, "GET", "/batch")  # the server admits environments from now on
        found = await ask(session, "POST", "/register-env", ENVIRONMENT)
        bodies = make_bodies(found["env_id"])
        left = iter(range(num_groups))
        began = time.perf_counter()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(send(session, bodies, left))
            await take(session, num_groups)
        return num_groups / (time.perf_counter() - began)


async def wait_for(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                await ask(session, "GET", "/info")
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
            else:
                return


async def send(session: aiohttp.ClientSession, bodies: list[bytes], left: Iterator[int]) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for number in left:
        body = bodies[number % len(bodies)]
        async with session.post("/scored_data", data=body, headers=headers) as response:
            response.raise_for_status()


async def take(session: aiohttp.ClientSession, num_groups: int) -> None:
    num_taken = 0
    while num_taken < num_groups:
        batch = (await ask(session, "GET", "/batch"))["batch"]
        num_taken += len(batch or ())
        if not batch:
            await asyncio.sleep(0.01)


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with session.request(method, path, json=body) as response:
        response.raise_for_status()
        return await response.json()


def make_bodies(env_id: int) -> list[bytes]:
    """Compressed request bodies of a few different groups."""
    numbers = random.Random(0)
    bodies = []
    for _ in range(16):
        rows = [
            [numbers.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)] for _ in range(GROUP_SIZE)
        ]
        half = NUM_TOKENS // 2
        group = {
            "tokens": rows,
            "masks": [[-100] * half + row[half:] for row in rows],
            "scores": [numbers.random() for _ in rows],
            "inference_logprobs": [
                [1.0] * half + [-numbers.random() for _ in range(half)] for _ in rows
            ],
            "env_id": env_id,
        }
        bodies.append(gzip.compress(json.dumps(group).encode()))
    return bodies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=400, help="a multiple of 8")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    atropos_python = os.environ.get("ROOKERY_ATROPOS_PYTHON", "")
    if not atropos_python:
        raise SystemExit("Set ROOKERY_ATROPOS_PYTHON to a Python that has atroposlib 0.4.")
    asyncio.run(main(atropos_python, num_groups=chosen.groups, rounds=chosen.rounds))
