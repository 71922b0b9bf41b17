"""Twenty kills in 500 iterations. Five minutes.

Workers, the hub and nodes of a Ray cluster are killed in turn.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evolve_command import (
    CONFIG,
    command,
    decided,
    once,
    report_of,
    require_sandbox,
    states,
    until,
    write_problem,
)
from marks import long
from scripted import Scripted, serve_scripted

from rookery.sandbox.server import descendants

pytestmark = [pytest.mark.timeout(3600), long, pytest.mark.filterwarnings("ignore")]
NUM_ITERATIONS = 500
FAULTS = (*["worker", "hub"] * 4, "worker", "to Ray", *["node", "worker", "hub"] * 3, "worker")
"""In this order, evenly spread over the run; `to Ray` kills the hub, which goes on with Ray."""
IN_FLIGHT = CONFIG["rookery"]["in_flight"]
NODE = {"object_store_memory": 80 << 20}


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    require_sandbox()
    folder = write_problem(tmp_path)
    patient = {**CONFIG, "evaluator": {"timeout": 60}}  # only kills may make an evaluation fail
    (folder / "config.yaml").write_text(json.dumps(patient))
    return folder


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


class Cluster:
    """A head node without work, and two nodes of which one can be replaced."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        head = {"num_cpus": 0, "include_dashboard": False, **NODE}
        self._cluster = RayCluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(num_cpus=2, **NODE) for _ in range(2)]
        self.address = self._cluster.address

    def kill_node(self) -> None:
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=2, **NODE))

    def processes(self) -> list[int]:
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes]
        return [pid for raylet in raylets for pid in descendants(raylet)]

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    started = Cluster()
    try:
        yield started
    finally:
        started.close()


class ChaosRun:
    """The command, killed and started again."""

    def __init__(self, folder: Path, model: Scripted, cluster: Cluster) -> None:
        self._folder = folder
        self._words: tuple[object, ...] = ("-i", NUM_ITERATIONS, *model.flags)
        self._cluster = cluster
        self._is_on_ray = False
        self._rng = random.Random(11)
        self.num_hub_kills = 0
        self.process = self._start()

    def _start(self, *more: object) -> "subprocess.Popen[bytes]":
        placed: tuple[object, ...] = ()
        if self._is_on_ray:
            placed = ("--executor", "ray", "--address", self._cluster.address)
        with (self._folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                command(*self._words, "--workers", 4, *placed, *more),
                cwd=self._folder,
                stdout=output,
                stderr=output,
            )

    def kill(self, fault: str) -> None:
        match fault:
            case "worker":
                until(lambda: bool(self._workers()), self.process)
                os.kill(self._rng.choice(self._workers()), signal.SIGKILL)
            case "node":
                self._cluster.kill_node()
            case _:
                self._is_on_ray = self._is_on_ray or fault == "to Ray"
                self.process.kill()
                assert self.process.wait(timeout=30) == -signal.SIGKILL
                self.num_hub_kills += 1
                self.process = self._start("--resume")

    def _workers(self) -> list[int]:
        word = "ray::RayHost" if self._is_on_ray else "rookery.executors.local_worker"
        pids = self._cluster.processes() if self._is_on_ray else descendants(self.process.pid)
        return [pid for pid in pids if word in _command_line(pid)]


def test_twenty_kills_in_500_iterations(problem: Path, cluster: Cluster) -> None:
    """Each iteration is generated, evaluated and decided once; the best program is never lost."""
    assert len(FAULTS) == 20
    with serve_scripted("--latency", 0.3) as model:
        chaos = ChaosRun(problem, model, cluster)
        try:
            for number, fault in enumerate(FAULTS, start=1):
                after = number * NUM_ITERATIONS // (len(FAULTS) + 2)
                until(_reached(problem, after), chaos.process, limit_s=900)
                chaos.kill(fault)
                assert (problem / "out" / "best" / "best_program.py").is_file()
            code = chaos.process.wait(timeout=900)
        finally:
            chaos.process.kill()
        num_calls = model.stats()["calls"]
    assert code == 0, (problem / "output.txt").read_text()[-4000:]
    assert decided(problem) == once(NUM_ITERATIONS)
    counts = states(problem)
    for state in ("planned", "generated"):
        assert all(counts[number, state] == 1 for number in range(1, NUM_ITERATIONS + 1)), state
    assert max(counts[number, "evaluated"] for number in range(1, NUM_ITERATIONS + 1)) == 1
    assert NUM_ITERATIONS <= num_calls <= NUM_ITERATIONS + chaos.num_hub_kills * IN_FLIGHT
    report = report_of(problem)
    assert report["num_iterations"] == NUM_ITERATIONS
    assert report["num_failed"] <= len(FAULTS), report["failures"]


def _reached(folder: Path, num: int) -> Callable[[], bool]:
    return lambda: decided(folder).total() >= num
