"""The whole path with the backend `unsafe`, which runs everywhere."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rookery.errors import SandboxError
from rookery.sandbox import (
    EvaluatorConfig,
    Sandbox,
    SandboxConfig,
    choose_backend,
    read_variants,
)
from rookery.sandbox.server import descendants

CONFIG = SandboxConfig(backend="unsafe", output_bytes=2**20, memory_bytes=2**28)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    file = tmp_path / "evaluator.py"
    file.write_text("import runpy\ndef evaluate(path): return runpy.run_path(path)['metrics']")
    async with Sandbox(CONFIG, EvaluatorConfig(file=file, timeout_s=10.0)) as opened:
        yield opened


def own_cgroups() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/rookery-{os.getpid()}-*"))


async def until_more_than(pids: set[int]) -> None:
    """Until a process below this one is none of these."""
    async with asyncio.timeout(30.0):
        while set(descendants(os.getpid())) <= pids:  # noqa: ASYNC110  processes tell no event
            await asyncio.sleep(0.01)


FAILURES = {
    "import os; os._exit(0)": "crash",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "killed",
    "import os; os.kill(os.getpid(), 40)": "killed",
    "x = bytearray(10 * 2**30)": "memory",
    "while True: print('x' * 1000)": "output",
    "metrics = {'s': float('nan')}": "not_finite",
    "metrics = 3": "not_a_dict",
    "\ud800": "error",
}


async def test_failures_and_then_a_good_one(sandbox: Sandbox) -> None:
    for text, kind in FAILURES.items():
        outcome = await sandbox.evaluate(text)
        assert outcome.failure is not None and outcome.failure.kind == kind, outcome
        assert (await sandbox.evaluate("metrics = {'s': 1.0}")).metrics == {"s": 1.0}


async def test_candidates_do_not_share_state(sandbox: Sandbox) -> None:
    text = "import builtins\nmetrics = {'seen': hasattr(builtins, 'x')}\nbuiltins.x = 1"
    for _ in range(2):
        assert (await sandbox.evaluate(text)).metrics == {"seen": False}


async def test_names_of_temporary_folders_are_in_no_result(sandbox: Sandbox) -> None:
    """They would enter prompts: two runs of one config would ask different questions."""
    text = """
import evaluation_module, os
print(os.getcwd())
metrics = {'cwd': os.getcwd(), 'file': evaluation_module.__file__}
"""
    outcome = await sandbox.evaluate(text)
    assert outcome.metrics == {"cwd": "/tmp", "file": "/rookery/evaluator/evaluator.py"}
    assert outcome.output_tail == "/tmp\n"


async def test_a_timeout_ends_the_candidate_only(tmp_path: Path) -> None:
    file = tmp_path / "evaluator.py"
    file.write_text(
        "import os, time\ndef evaluate(path):\n while 'x' in open(path).read(): pass\n"
        " return {'parent': os.getppid() > 0}"
    )
    async with Sandbox(CONFIG, EvaluatorConfig(file=file, timeout_s=0.5)) as sandbox:
        late = await sandbox.evaluate("x")
        assert late.failure is not None and late.failure.kind == "timeout"
        assert (await sandbox.evaluate("y")).metrics == {"parent": True}


async def test_a_dead_server_is_started_again(sandbox: Sandbox) -> None:
    """In `unsafe` a candidate can kill the server: its own evaluation fails, the next does not, and
    does not find what the first one wrote."""
    text = """
import os, signal
open("left", "w").close()
for pid in (os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().split()[3])):
    os.kill(pid, signal.SIGSTOP)
os.kill(pid, signal.SIGKILL)
"""
    outcome = await sandbox.evaluate(text)
    assert outcome.failure is not None and outcome.failure.kind == "killed"
    listing = "import os; metrics = {'num_files': len(os.listdir())}"
    assert (await sandbox.evaluate(listing)).metrics == {"num_files": 1}


async def test_cpu_time_is_counted_per_candidate(tmp_path: Path) -> None:
    """Each takes less than the limit; all of one server together take more."""
    file = tmp_path / "evaluator.py"
    file.write_text(
        "import time\ndef evaluate(path):\n while time.process_time() < 0.5: pass\n return {'s': 1}"
    )
    config = CONFIG.model_copy(update={"cpu_s": 0.9})
    async with Sandbox(config, EvaluatorConfig(file=file, timeout_s=60.0)) as sandbox:
        for _ in range(2):
            outcome = await sandbox.evaluate("x")
            assert outcome.failure is None, outcome


async def test_closing_while_a_candidate_runs_is_its_outcome(tmp_path: Path) -> None:
    file = tmp_path / "evaluator.py"
    file.write_text("import time\ndef evaluate(path):\n time.sleep(600)")
    async with Sandbox(CONFIG, EvaluatorConfig(file=file)) as sandbox:
        before = set(descendants(os.getpid()))
        running = asyncio.create_task(sandbox.evaluate("x"))
        waiting = asyncio.create_task(sandbox.evaluate("y"))
        await until_more_than(before)
    outcome = await running
    assert outcome.failure is not None and outcome.failure.kind == "killed"
    with pytest.raises(SandboxError, match="closed"):
        await waiting


async def test_cancelled_twice_it_still_ends_all_before_the_block_is_left(tmp_path: Path) -> None:
    file = tmp_path / "evaluator.py"
    file.write_text("import time\ndef evaluate(path):\n time.sleep(600)")
    before = set(descendants(os.getpid()))
    async with Sandbox(CONFIG, EvaluatorConfig(file=file)) as sandbox:
        task = asyncio.create_task(sandbox.evaluate("x"))
        await until_more_than(set(descendants(os.getpid())))
        for _ in range(3):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(descendants(os.getpid())) <= before
    assert not own_cgroups()


async def test_unsafe_is_taken_when_named_only() -> None:
    assert (await choose_backend(CONFIG)).backend == "unsafe"
    with pytest.raises(SandboxError, match="choose"):
        Sandbox(SandboxConfig(), EvaluatorConfig(file=Path("evaluator.py")))


async def test_many_callers_take_turns(sandbox: Sandbox) -> None:
    texts = [f"metrics = {{'s': {number}}}" for number in range(8)]
    outcomes = await asyncio.gather(*map(sandbox.evaluate, texts))
    assert [outcome.metrics["s"] for outcome in outcomes] == list(range(8))


async def test_descriptors_do_not_leak(sandbox: Sandbox) -> None:
    await sandbox.evaluate("metrics = {'s': 1.0}")
    before = set(os.listdir("/proc/self/fd"))
    for text in ("metrics = {'s': 1.0}", "import os; os._exit(1)"):
        await sandbox.evaluate(text)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_variants_share_processes_and_begin_from_the_same_seed(sandbox: Sandbox) -> None:
    text = "import os, random\nmetrics = {'x': random.random(), 'pid': os.getpid(), 'n': NUMBER}"
    variants = [text.replace("NUMBER", str(number)) for number in range(3)]
    broken = "raise ValueError"
    outcome = await sandbox.evaluate("", seed=7, variants=[*variants, broken])
    assert outcome.failure is None and outcome.metrics == {}
    *rows, failed = read_variants(outcome, num=4)
    assert failed is None
    known = [row for row in rows if row is not None]
    assert [row["n"] for row in known] == [0, 1, 2]
    assert len({row["x"] for row in known}) == len({row["pid"] for row in known}) == 1
    alone = await sandbox.evaluate(variants[1], seed=7)
    assert alone.metrics["x"] == known[1]["x"]
    ended = await sandbox.evaluate("", variants=[variants[0], "import os; os._exit(0)"])
    assert ended.failure is not None and read_variants(ended, num=2) == []


FORGE = """
import os
for number in range(3, 40):
    try:
        os.write(number, LINES)
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize("artifacts", ["{}", '{"variants": {"text": "[3, 4]"}}', "[]"])
async def test_a_forged_result_has_no_variants(sandbox: Sandbox, artifacts: str) -> None:
    stage = f'{{"stage": "evaluation", "metrics": {{}}, "artifacts": {artifacts}}}'
    lines = f'{{"begin": "evaluation"}}\n{stage}\n{{"done": true}}\n'.encode()
    text = FORGE.replace("LINES", repr(lines))
    outcome = await sandbox.evaluate("", variants=[text, text], isolate=False)
    assert read_variants(outcome, num=2) == []


async def test_a_variant_cannot_redirect_the_text_of_the_next(sandbox: Sandbox) -> None:
    text = (
        "import os\nif NUMBER == 0: os.symlink('kept', 'variant1.py'); open('kept', 'w').close()\n"
    )
    text += "metrics = {'size': os.path.getsize('kept')}"
    variants = [text.replace("NUMBER", str(number)) for number in range(2)]
    outcome = await sandbox.evaluate("", variants=variants)
    assert [row and row["size"] for row in read_variants(outcome, num=2)] == [0, 0]
