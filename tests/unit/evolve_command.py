"""`rookery evolve run` as a process of its own on a small problem, for tests with real parts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import RunError
from rookery.runs import Run, read_attempts
from rookery.sandbox import probe

PROGRAM = """# EVOLVE-BLOCK-START
def solve():
    return 0.25
# EVOLVE-BLOCK-END
"""
EVALUATOR = """import runpy

def evaluate(path):
    score = runpy.run_path(path)["solve"]()
    return {"combined_score": score, "half": score / 2}
"""
CONFIG: dict[str, Any] = {
    "checkpoint_interval": 10,
    "database": {"num_islands": 2, "population_size": 40},
    "evaluator": {"timeout": 3},
    "rookery": {"in_flight": 8, "workers": 2, "sandbox": {"memory_mb": 256, "processes": 16}},
}


def require_sandbox() -> None:
    """Skip with the reason where no sandbox works; under CI fail."""
    probes = asyncio.run(probe())
    if not any(each.works for each in probes):
        reason = "; ".join(f"{each.backend}: {each.reason}" for each in probes)
        assert "CI" not in os.environ, reason
        pytest.skip(reason)


def write_problem(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "evaluator.py").write_text(EVALUATOR)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    return folder


def command(*words: object) -> list[str]:
    own = ("evolve", "run", "program.py", "evaluator.py", "-c", "config.yaml", "-o", "out")
    return [sys.executable, "-m", "rookery", *own, *map(str, words)]


def run(folder: Path, *words: object, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def states(folder: Path) -> Counter[tuple[int, str]]:
    """How often each iteration was recorded in each state."""
    try:
        with Run.view(folder / "out") as view:
            return Counter((a.number, a.state) for _, a in read_attempts(view))
    except RunError:  # it has not begun
        return Counter()


def decided(folder: Path) -> Counter[int]:
    """How often each iteration was decided."""
    counts: Counter[int] = Counter()
    for (number, state), count in states(folder).items():
        if state in ("committed", "failed"):
            counts[number] += count
    return counts


def once(num: int) -> Counter[int]:
    return Counter(range(1, num + 1))


def report_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return loaded


def until(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes]", *, limit_s: float = 90
) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < end
        time.sleep(0.05)


def stop(
    folder: Path, number: signal.Signals, *words: object, after: int, limit_s: float = 90
) -> int:
    """Start the command, send it a signal when so many are decided, and give its exit code."""
    with subprocess.Popen(
        command(*words), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: decided(folder).total() >= after, process, limit_s=limit_s)
            process.send_signal(number)
            return process.wait(timeout=60)
        finally:
            process.kill()
