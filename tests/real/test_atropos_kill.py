"""Trainer, server, gateway and environments that are killed: every group that was accepted is
trained on once, or waits for it. Some minutes on an idle core:

    ROOKERY_LONG=1 ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm \\
    pytest tests/real/test_atropos_kill.py
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from marks import long
from safetensors.torch import load_file
from tests.real.peers import needs_vllm, served_on_cpu, toy_training
from tiny import write_tiny_model

import rookery
from rookery.compat.atropos.gateway import trained_groups
from rookery.compat.atropos.group_queue import (
    GroupQueue,
    Registration,
    Registry,
    TrainerRegistration,
)
from rookery.fleet import Fleet
from rookery.fleet.bridges.update import BaseUpdate
from rookery.runs import Run
from rookery.train import FullTrainer

RECORDED = Path(__file__).with_name("recorded_environment.py")
TOY = Path(__file__).parents[1] / "unit" / "environments" / "toy_environment.py"
pytestmark = [
    long,
    pytest.mark.timeout(1800),
]
STEPS = 12
POINTS = [
    ("before environment", 1),
    ("after environment", 1),
    ("before batch", 1),
    ("after batch", 1),
    ("before batch", 3),
    ("after batch", 3),
    ("before checkpoint", 1),
    ("after checkpoint", 1),
]
"""Each is passed in the process that goes on after the one before was killed."""
KILLED = """
import json, os, signal, sys
from pathlib import Path
from rookery.compose.grpo import run_grpo
from rookery.compose.kinds import resume
from rookery.runs import Run

config, runs, point, number = json.loads(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
append, num = Run.append, 0

async def passing(self, kind, payload, *, key=""):
    global num
    num += kind == point.split()[1]
    is_there = kind == point.split()[1] and num == int(number)
    if is_there and point.startswith("before"):
        os.kill(os.getpid(), signal.SIGKILL)
    event = await append(self, kind, payload, key=key)
    if is_there:
        os.kill(os.getpid(), signal.SIGKILL)
    return event

Run.append = passing
if (runs / "toy").exists():
    resume(runs / "toy")
else:
    run_grpo(config, runs_dir=runs, name="toy", progress=False)
"""


def config_of(folder: Path, environment: dict[str, Any]) -> dict[str, Any]:
    drawing = {"max_tokens": 8}
    return toy_training(folder, environment, steps=STEPS, drawing=drawing, max_gap=100.0)


def own_environment(**changes: Any) -> dict[str, Any]:
    command = [sys.executable, str(TOY), "{gateway}", "{engine}"]
    return {"port": 0, "environments": [{"command": command, **changes}]}


async def check_groups(path: Path, *, num_steps: int) -> None:
    """No group is in two batches, and those that are in none wait."""
    with Run.open(path) as run:
        batches = [event.payload["groups"] for event in run.events("batch")]
        trained = trained_groups(run)
        environments = [event.payload for event in run.events("environment")]
        registry = Registry(TrainerRegistration(batch_size=8, max_token_len=64))
        queue = await GroupQueue.open(run, registry_of(registry, environments), trained=trained)
        waiting = {queued.seq for queued in queue.take_rest()}
    assert len(batches) == num_steps
    assert sum(map(len, batches)) == len(trained) == 2 * num_steps
    assert not trained & waiting
    assert trained | waiting == set(range(1, max(trained | waiting) + 1)), "none is lost"


def registry_of(registry: Registry, environments: Sequence[Mapping[str, Any]]) -> Registry:
    for payload in environments:
        registry.add(Registration.model_validate(payload))
    return registry


async def test_a_trainer_that_is_killed_at_every_point(tmp_path: Path) -> None:
    config = config_of(write_tiny_model(tmp_path / "tiny"), own_environment())
    words = [sys.executable, "-c", KILLED, json.dumps(config), str(tmp_path / "runs")]
    for point, number in POINTS:
        killed = await asyncio.to_thread(
            subprocess.run, [*words, point, str(number)], check=False, timeout=600
        )
        assert killed.returncode == -signal.SIGKILL, f"{point} {number} was not passed"
    last = await asyncio.to_thread(
        subprocess.run, [*words, "before nothing", "1"], check=False, timeout=600
    )
    assert last.returncode == 0
    await check_groups(tmp_path / "runs" / "toy", num_steps=STEPS)


async def test_environments_that_are_killed_are_started_again(tmp_path: Path) -> None:
    config = config_of(write_tiny_model(tmp_path / "tiny"), own_environment(restarts=3))
    running = asyncio.create_task(
        asyncio.to_thread(
            rookery.run_grpo, config, runs_dir=tmp_path / "runs", name="toy", progress=False
        )
    )
    killed: set[int] = set()
    while not running.done():
        await asyncio.sleep(0.2)
        steps = len(await asyncio.to_thread(metrics, tmp_path / "runs" / "toy"))
        if len(killed) < 2 and steps > 3 * len(killed):
            killed |= kill_new(killed)
    outcome = await running
    assert len(killed) == 2 and len(outcome.report.steps) == STEPS
    with Run.view(outcome.path) as run:
        assert len(list(run.events("environment"))) == 3
    await check_groups(outcome.path, num_steps=STEPS)


def metrics(path: Path) -> list[str]:
    file = path / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def kill_new(known: set[int]) -> set[int]:
    """Kill an environment of this process that was not killed yet, with its watcher."""
    for child in psutil.Process().children(recursive=True):
        if str(TOY) in child.cmdline() and os.getpgid(child.pid) not in known:
            group = os.getpgid(child.pid)
            os.killpg(group, signal.SIGKILL)
            return {group}
    return set()


async def test_a_gateway_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    gateway = tmp_path / "gateway.yaml"
    gateway.write_text(
        f"port: {port}\nvocab_size: 97\nfolder: groups\n"
        f"engine: {{type: embedded, model: {folder}, cache_gib: 0.01}}\n"
    )
    serve = [sys.executable, "-m", "rookery", "grpo", "gateway", str(gateway)]
    play = [sys.executable, str(TOY), url, f"{url}/v1"]
    running = asyncio.create_task(
        asyncio.to_thread(
            rookery.run_grpo,
            config_of(folder, {"url": url}),
            runs_dir=tmp_path / "runs", name="toy", progress=False,
        )
    )  # fmt: skip
    num_killed = 0
    while not running.done():
        with started(serve), started(play):
            until = 4 * (num_killed + 1)
            while not running.done() and (  # noqa: ASYNC110  another process writes the file
                num_killed >= 2 or len(metrics(tmp_path / "runs" / "toy")) < until
            ):
                await asyncio.sleep(0.2)
        num_killed += 1
    outcome = await running
    assert num_killed == 3 and len(outcome.report.steps) == STEPS
    with Run.view(outcome.path) as run:
        numbers = [int(event.payload["batch_id"]) for event in run.events("batch")]
    assert numbers == list(range(1, STEPS + 1))
    with Run.view(tmp_path / "groups") as run:
        groups = [seq for event in run.events("given") for seq in event.payload["groups"]]
    assert len(groups) == len(set(groups)) == 2 * STEPS, "none was given as two batches"


@contextmanager
def started(words: list[str]) -> Iterator[None]:
    """A program that is killed at the end of the block; one that cannot ask yet asks again."""
    script = " ".join(words)
    with subprocess.Popen(
        ["bash", "-c", f"until {script}; do sleep 0.2; done"],
        start_new_session=True, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


SERVER_POINTS = [
    (FullTrainer, "forward_backward", 2),  # it is down when the step is published
    (BaseUpdate, "ask_ahead", 4),  # it is paused
    (BaseUpdate, "name", 6),  # the weights have changed, and it was not told
    (Fleet, "sample", 22),  # an environment asks
]
"""Where the server is killed: as a method is called for the nth time."""


class Kills:
    """Kills the server of a run in this process at one point after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_killed = 0
        self._fleet: Fleet | None = None
        make = BaseUpdate.__init__

        def made(update: BaseUpdate, fleet: Fleet, *args: Any, **options: Any) -> None:
            self._fleet = fleet
            make(update, fleet, *args, **options)

        monkeypatch.setattr(BaseUpdate, "__init__", made)
        for owner, name, number in SERVER_POINTS:
            monkeypatch.setattr(owner, name, self._passing(getattr(owner, name), number))

    def _passing(self, method: Any, number: int) -> Any:
        calls = itertools.count(1)

        async def call(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                self._kill()
            return await method(*args, **options)

        return call

    def _kill(self) -> None:
        assert self._fleet is not None
        [replica] = self._fleet.pool.replicas
        assert replica.local is not None
        replica.local.kill()
        self.num_killed += 1


@needs_vllm
async def test_a_server_that_is_killed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    folder = write_tiny_model(tmp_path / "tiny", **sizes)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = await asyncio.to_thread(train_on_server, folder, "whole")
    kills = Kills(monkeypatch)
    weights = await asyncio.to_thread(train_on_server, folder, "killed")
    assert kills.num_killed == len(SERVER_POINTS)
    assert all(torch.equal(weights[name], own) for name, own in expected.items())
    first = load_file(folder / "model.safetensors")
    assert any(not torch.equal(first[name], own) for name, own in expected.items())
    await check_groups(tmp_path / "killed", num_steps=STEPS)


def train_on_server(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The weights after a training in the memory of a server."""
    launch = served_on_cpu(folder, restarts=10, max_model_len=64)
    command = [sys.executable, str(RECORDED), "{gateway}", "{engine}"]
    config = config_of(folder, {"port": 0, "environments": [{"command": command}]}) | {
        "engine": {"type": "fleet", "launch": launch, "all_down_timeout_s": 900},
        "full": True, "bridge": "alias", "learning_rate": 1e-3,
    }  # fmt: skip
    del config["lora"]
    outcome = rookery.run_grpo(config, runs_dir=folder.parent, name=name, progress=False)
    place = outcome.path / "checkpoints" / f"step_{STEPS}" / "model.safetensors"
    weights: dict[str, torch.Tensor] = load_file(place)
    return weights
