"""The deterministic mode of the command under SIGTERM: the export has the same bytes. A minute."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from evolve_command import decided, once, require_sandbox, run, stop, write_problem
from marks import long
from scripted import Scripted, serve_scripted

pytestmark = [pytest.mark.timeout(240), long]
NUM_ITERATIONS = 24


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    require_sandbox()
    with serve_scripted("--latency", 0.1) as scripted:
        yield scripted


def flags(model: Scripted, *, workers: int) -> tuple[object, ...]:
    return ("-i", NUM_ITERATIONS, "--mode", "deterministic", "--workers", workers, *model.flags)


def finish(folder: Path, *words: object) -> bytes:
    """Run to the end; the bytes of the export."""
    ended = run(folder, *words)
    assert ended.returncode == 0, ended.stderr
    export = [sys.executable, "-m", "rookery", "evolve", "export", "out", "population.jsonl"]
    subprocess.run(export, cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return (folder / "population.jsonl").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(model: Scripted, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = write_problem(tmp_path_factory.mktemp("undisturbed"))
    text = finish(folder, *flags(model, workers=2))
    assert text.count(b"\n") == NUM_ITERATIONS + 1
    return text


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_a_run_that_is_stopped_twice_exports_the_same_bytes(
    tmp_path: Path, model: Scripted, undisturbed: bytes, workers: int
) -> None:
    folder, rng = write_problem(tmp_path), random.Random(workers)
    words = flags(model, workers=workers)
    after = rng.randrange(1, 10)
    assert stop(folder, signal.SIGTERM, *words, after=after) == 143
    after = decided(folder).total() + rng.randrange(1, 5)
    assert after < NUM_ITERATIONS
    assert stop(folder, signal.SIGTERM, *words, "--resume", after=after) == 143
    assert finish(folder, *words, "--resume") == undisturbed
    assert decided(folder) == once(NUM_ITERATIONS)
