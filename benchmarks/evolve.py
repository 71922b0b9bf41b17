"""Cost of evolve's controller with a model that takes seconds per call; OpenEvolve beside it.

    python benchmarks/evolve.py                                   # 5 s a call; a quarter of an hour
    python benchmarks/evolve.py --latency 0.5 --in-flight 16 --iterations 64 --only rookery

A scripted model in its own process answers every call after `--latency` seconds. `bare` is a client
that only keeps the same number of calls in flight. Efficiency is iterations per second relative to
its calls per second, from the first call to the last answer by the model's clock. CPU is that of
the hub's process in this time; memory is its peak, and the peak of all its processes together.
`growth` compares the CPU at 100 and at 10,000 programs.
OpenEvolve 0.4 needs ROOKERY_OPENEVOLVE_PYTHON, Ray the package ray.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from process_tree import Usage, watch

HERE = Path(__file__).parent
PROGRAM = "# EVOLVE-BLOCK-START\ndef solve():\n    return 0.25\n# EVOLVE-BLOCK-END\n"
EVALUATOR = """import runpy

def evaluate(path):
    return {"combined_score": runpy.run_path(path)["solve"]()}
"""
NUM_ROUNDS = 10
"""Iterations per call in flight; start and end ramps are then about a tenth of the time."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work given to one side."""

    in_flight: int
    iterations: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """The scripted model."""

    url: str

    def stats(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/stats", timeout=10) as answer:
            loaded: dict[str, float] = json.load(answer)
        return loaded


@contextmanager
def serve(latency_s: float) -> Iterator[Server]:
    command = [sys.executable, str(HERE / "scripted_model.py"), "--latency", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(url=process.stdout.readline().strip())
        finally:
            process.kill()


async def ask_bare(server: Server, load: Load) -> None:
    """Make the calls of a load without a controller."""
    left = iter(range(load.iterations))
    message = {"role": "user", "content": f"# Current Program\n```python\n{PROGRAM}```"}
    limit = aiohttp.ClientTimeout(total=600)

    async def client(session: aiohttp.ClientSession) -> None:
        for seed in left:
            body = {"model": "scripted", "messages": [message], "seed": seed}
            async with session.post(f"{server.url}/chat/completions", json=body) as answer:
                await answer.json()

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limit) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(load.in_flight):
            group.create_task(client(session))


def write_problem(folder: Path) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "evaluator.py").write_text(EVALUATOR)
    return [str(folder / "program.py"), str(folder / "evaluator.py")]


def rookery_command(server: Server, load: Load, folder: Path, *more: str) -> list[str]:
    flags = {
        "-i": load.iterations,
        "--api-base": server.url,
        "--primary-model": "scripted",
        "--in-flight": load.in_flight,
        "--workers": load.workers,
        "--checkpoint-interval": 100,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    problem = write_problem(folder)
    return [sys.executable, "-m", "rookery", "evolve", "run", *problem, *words, *more]


def openevolve_command(server: Server, load: Load, folder: Path) -> list[str]:
    config = {
        "max_iterations": load.iterations,
        "log_level": "WARNING",
        "llm": {
            "api_base": server.url,
            "api_key": "none",
            "models": [{"name": "scripted", "weight": 1.0}],
        },
        "evaluator": {"parallel_evaluations": load.in_flight},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    start = "import sys; from openevolve.cli import main; sys.exit(main())"
    python = os.environ["ROOKERY_OPENEVOLVE_PYTHON"]
    problem = write_problem(folder)
    return [python, "-c", start, *problem, "-c", str(folder / "config.yaml")]


def run(command: Sequence[str], server: Server) -> Usage:
    """Run a command to its end and measure its use of CPU and memory."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        usage = watch(process, num_calls=lambda: int(server.stats()["calls"]))
        if process.returncode:
            output.seek(0)
            raise SystemExit(output.read().decode(errors="replace")[-4000:])
    return usage


def rate(server: Server, load: Load) -> float:
    stats = server.stats()
    return load.iterations / (stats["last_s"] - stats["first_s"])


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[str]:
    """Start a Ray cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": num_cpus // 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        cluster.add_node(num_cpus=num_cpus - num_cpus // 2)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def measure(name: str, load: Load, latency_s: float) -> tuple[float, Usage | None]:
    """Iterations per second of one side, with its use of CPU and memory."""
    with serve(latency_s) as server, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name == "bare":
            asyncio.run(ask_bare(server, load))
            return rate(server, load), None
        if name == "ray":
            with ray_cluster(load.workers) as address:
                more = ("--executor", "ray", "--address", address)
                usage = run(rookery_command(server, load, folder, *more), server)
        elif name == "openevolve":
            usage = run(openevolve_command(server, load, folder), server)
        else:
            kept = ("--database.population_size", str(load.iterations + 1))
            usage = run(rookery_command(server, load, folder, *kept), server)
        return rate(server, load), usage


def report(name: str, load: Load, latency_s: float, bare: float) -> float:
    found, usage = measure(name, load, latency_s)
    assert usage is not None
    print(
        f"{name:<11} {load.in_flight:>4} in flight  {found:7.2f} it/s  efficiency "
        f"{found / bare:5.3f}  hub {usage.cpu_ms(1, load.iterations - 1):6.2f} ms CPU/it  "
        f"hub {usage.hub_mb:6.0f} MB  all {usage.all_mb:6.0f} MB",
        flush=True,
    )
    return found / bare


def compare(sides: Sequence[str], load: Load, latency_s: float) -> None:
    """Measure the bare client, then the sides under the same load."""
    bare, _ = measure("bare", load, latency_s)
    print(f"{'bare':<11} {load.in_flight:>4} in flight  {bare:7.2f} calls/s", flush=True)
    found = {}
    for name in ("rookery", "openevolve", "ray"):
        if name == "openevolve" and not os.environ.get("ROOKERY_OPENEVOLVE_PYTHON"):
            continue
        if name in sides:
            found[name] = report(name, load, latency_s, bare)
    if len(found) == 2:
        times = found["rookery"] / found["openevolve"]
        print(f"rookery is {times:.2f} times as efficient", flush=True)


def report_growth(num_programs: int) -> None:
    """Print the hub's CPU per iteration with few and with many programs, using a fast model."""
    load = Load(in_flight=64, iterations=num_programs, workers=2)
    _, usage = measure("growth", load, 0.2)
    assert usage is not None
    window = max(
        200, num_programs // 10
    )  # calls come in bursts, which a smaller window would measure
    few = usage.cpu_ms(100, 100 + window)
    many = usage.cpu_ms(num_programs - window, num_programs - 1)
    print(
        f"growth: {few:.2f} ms CPU/it at 100 programs, {many:.2f} at {num_programs:,}, "
        f"{many / few:.2f} times; hub {usage.hub_mb:.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=5.0)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--iterations", type=int, help=f"default: {NUM_ROUNDS} x in flight")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--programs", type=int, default=10_000, help="of the side `growth`")
    parser.add_argument("--only", default="rookery,openevolve,ray,growth")
    flags = parser.parse_args()
    sides = flags.only.split(",")
    begun = time.monotonic()
    if local := [side for side in sides if side in ("rookery", "openevolve")]:
        for in_flight in flags.in_flight:
            iterations = flags.iterations or NUM_ROUNDS * in_flight
            load = Load(in_flight=in_flight, iterations=iterations, workers=flags.workers)
            is_first = in_flight == flags.in_flight[0]
            compare(local if is_first else ["rookery"], load, flags.latency)
    if "ray" in sides:
        iterations = flags.iterations or NUM_ROUNDS * 16
        compare(["ray"], Load(in_flight=16, iterations=iterations, workers=16), flags.latency)
    if "growth" in sides:
        report_growth(flags.programs)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
