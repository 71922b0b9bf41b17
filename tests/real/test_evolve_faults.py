"""Twenty kills in 500 iterations, and what the same faults do to OpenEvolve 0.4. Eight minutes.

Needs ROOKERY_OPENEVOLVE_PYTHON (`make test-real`), which also keeps these tests out of the quick
ones. OpenEvolve has no distributed mode, so a lost Ray node has no counterpart there.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from evolve_command import (
    CONFIG,
    command,
    decided,
    once,
    report_of,
    require_sandbox,
    run,
    states,
    until,
    write_problem,
)
from loops.evolve.conftest import openevolve_python
from scripted import Scripted, serve_scripted

from rookery.sandbox.process_tree import descendants

__all__ = ["openevolve_python"]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("openevolve_python"),
    pytest.mark.filterwarnings("ignore"),
]
NUM_ITERATIONS = 500
FAULTS = (*["worker", "hub"] * 4, "worker", "to Ray", *["node", "worker", "hub"] * 3, "worker")
"""In this order, evenly spread over the run; `to Ray` kills the hub, which goes on with Ray."""
IN_FLIGHT = CONFIG["rookery"]["in_flight"]
NODE = {"object_store_memory": 80 << 20}
START_OPENEVOLVE = "import sys; from openevolve.cli import main; sys.exit(main())"


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    require_sandbox()
    return write_problem(tmp_path)


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
                until(_reached(problem, after), chaos.process, limit_s=180)
                chaos.kill(fault)
                assert (problem / "out" / "best" / "best_program.py").is_file()
            code = chaos.process.wait(timeout=180)
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


class Reference:
    """OpenEvolve's own command on the same problem."""

    def __init__(self, folder: Path, python: str, model: Scripted) -> None:
        self._folder = folder
        self._python = python
        config = {
            "max_iterations": 40,
            "checkpoint_interval": 10,
            "log_level": "WARNING",
            "llm": {
                "api_base": model.url,
                "api_key": "none",
                "models": [{"name": "scripted", "weight": 1.0}],
            },
            "evaluator": {"parallel_evaluations": 4, "timeout": 3},
        }
        (folder / "theirs.yaml").write_text(json.dumps(config))

    @contextmanager
    def started(self, *words: object) -> Iterator["subprocess.Popen[bytes]"]:
        own = ("program.py", "evaluator.py", "-c", "theirs.yaml", "-o", "theirs")
        with subprocess.Popen(
            [self._python, "-c", START_OPENEVOLVE, *own, *map(str, words)],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):  # its workers outlive it when it is killed
                    os.killpg(process.pid, signal.SIGKILL)

    def checkpoints(self) -> list[int]:
        folders = (self._folder / "theirs" / "checkpoints").glob("checkpoint_*")
        return sorted(int(folder.name.rpartition("_")[2]) for folder in folders)


def _calls(model: Scripted) -> int:
    return int(model.stats()["calls"])


def test_openevolve_ends_early_when_a_worker_is_killed(
    problem: Path, openevolve_python: str
) -> None:
    with serve_scripted("--latency", 0.3) as model:
        theirs = Reference(problem, openevolve_python, model)
        with theirs.started() as process:
            until(lambda: _calls(model) >= 8, process)
            workers = [pid for pid in descendants(process.pid)[1:] if _is_worker(pid)]
            os.kill(workers[0], signal.SIGKILL)
            code = process.wait(timeout=120)
        num_calls = _calls(model)
    assert code == 0, "it ends as if all were done"
    assert num_calls < 40, "and it is not"


def _is_worker(pid: int) -> bool:
    line = _command_line(pid)
    return bool(line) and "resource_tracker" not in line and "semaphore_tracker" not in line


def test_openevolve_pays_again_for_what_came_after_its_last_checkpoint(
    problem: Path, openevolve_python: str
) -> None:
    """Killed after iteration 10 and before 20, the run goes on from checkpoint 10."""
    with serve_scripted("--latency", 0.3) as model:
        theirs = Reference(problem, openevolve_python, model)
        with theirs.started("-i", 40) as process:
            until(lambda: _calls(model) >= 19, process)
            process.kill()
            process.wait(timeout=30)
        assert theirs.checkpoints() == [10]
        checkpoint = "theirs/checkpoints/checkpoint_10"
        with theirs.started("--checkpoint", checkpoint, "-i", 30) as process:
            assert process.wait(timeout=120) == 0
        num_calls = _calls(model)
    assert num_calls > 40 + 4, "more than all iterations and those in flight"


EXIT = "```python\ndef solve():\n    import os; os._exit(139)\n```"
WRITE = "```python\ndef solve():\n    open({path!r}, 'w').close()\n    return {score}\n```"


def _full_rewrites(folder: Path) -> None:
    (folder / "config.yaml").write_text(json.dumps(CONFIG | {"diff_based_evolution": False}))
    theirs = json.loads((folder / "theirs.yaml").read_text())
    (folder / "theirs.yaml").write_text(json.dumps(theirs | {"diff_based_evolution": False}))


def test_a_program_that_exits_fails_alone_and_ends_openevolve(
    problem: Path, openevolve_python: str
) -> None:
    good = [f"```python\ndef solve():\n    return 0.{number}\n```" for number in range(30, 60)]
    (problem / "answers.json").write_text(json.dumps([*[EXIT] * 5, *good]))
    with serve_scripted("--latency", 0.1, "--answers", problem / "answers.json") as model:
        theirs = Reference(problem, openevolve_python, model)
        _full_rewrites(problem)
        ended = run(problem, "-i", 60, *model.flags)
        before = _calls(model)
        with theirs.started("-i", 60) as process:
            code = process.wait(timeout=120)
        num_calls = _calls(model) - before
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(60)
    kinds: dict[str, Any] = {f["kind"]: f["count"] for f in report_of(problem)["failures"]}
    assert kinds.get("crash", 0) >= 1, kinds
    assert code == 0 and num_calls < 60, "it ends as if all were done"


def test_a_program_that_writes_outside_is_stopped_here_alone(
    problem: Path, openevolve_python: str
) -> None:
    outside = problem / "outside"
    outside.mkdir()
    answers = [WRITE.format(path=str(outside / f"{i}"), score=0.3 + i / 100) for i in range(8)]
    (problem / "answers.json").write_text(json.dumps(answers))
    with serve_scripted("--latency", 0.05, "--answers", problem / "answers.json") as model:
        theirs = Reference(problem, openevolve_python, model)
        _full_rewrites(problem)
        ended = run(problem, "-i", 8, *model.flags)
        assert ended.returncode == 0, ended.stderr
        assert decided(problem) == once(8)
        assert not list(outside.iterdir())
        with theirs.started("-i", 8) as process:
            assert process.wait(timeout=120) == 0
    assert list(outside.iterdir()), "OpenEvolve runs it with all rights"
