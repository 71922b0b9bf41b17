"""evolve as a user runs it: the command, a model over HTTP, the sandbox, signals. Two minutes.

Without a sandbox the tests skip with the reason; under CI they fail.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.conftest import OpenEvolve, openevolve, openevolve_python
from scripted import Scripted, serve_scripted

from rookery.errors import RunError
from rookery.runs import Run, read_attempts
from rookery.sandbox import probe

__all__ = ["openevolve", "openevolve_python"]

pytestmark = pytest.mark.timeout(240)

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


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    probes = asyncio.run(probe())
    if not any(each.works for each in probes):
        reason = "; ".join(f"{each.backend}: {each.reason}" for each in probes)
        assert "CI" not in os.environ, reason
        pytest.skip(reason)


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    return tmp_path


def command(*words: object) -> list[str]:
    own = ("evolve", "run", "program.py", "evaluator.py", "-c", "config.yaml", "-o", "out")
    return [sys.executable, "-m", "rookery", *own, *map(str, words)]


def run(folder: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def decided(folder: Path) -> Counter[int]:
    """How often each iteration was decided."""
    try:
        with Run.view(folder / "out") as view:
            attempts = [attempt for _, attempt in read_attempts(view)]
    except RunError:  # it has not begun
        return Counter()
    return Counter(a.number for a in attempts if a.state in ("committed", "failed"))


def once(num: int) -> Counter[int]:
    return Counter(range(1, num + 1))


def report_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return loaded


def until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < end
        time.sleep(0.05)


def stop(folder: Path, number: signal.Signals, *words: object, after: int) -> int:
    """Start the command, send it a signal when so many are decided, and give its exit code."""
    with subprocess.Popen(
        command(*words), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: decided(folder).total() >= after, process)
            process.send_signal(number)
            return process.wait(timeout=60)
        finally:
            process.kill()


def test_hostile_programs_fail_and_all_is_decided(problem: Path) -> None:
    with serve_scripted("--latency", 0.05, "--hostile", 0.5) as model:
        ended = run(problem, "-i", 30, *model.flags)
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(30)
    report = report_of(problem)
    kinds = {failure["kind"] for failure in report["failures"]}
    assert report["num_failed"] + report["num_committed"] == 30
    assert report["num_failed"] >= 5 and len(kinds) >= 3, kinds
    assert report["best"]["score"] > 0.25
    assert not Path("/etc/rookery-was-here").exists()
    assert "return" in (problem / "out" / "best" / "best_program.py").read_text()


def test_a_killed_hub_resumes_and_nothing_is_done_twice(problem: Path) -> None:
    with serve_scripted("--latency", 0.3) as model:
        for session, after in enumerate((5, 15)):
            words = ("--resume",) if session else ()
            code = stop(problem, signal.SIGKILL, "-i", 30, *model.flags, *words, after=after)
            assert code == -signal.SIGKILL
            assert (problem / "out" / "best" / "best_program.py").is_file()
        refused = run(problem, "-i", 30, *model.flags)
        assert refused.returncode == 2 and "--resume goes on with it" in refused.stderr
        ended = run(problem, "-i", 30, *model.flags, "--resume")
        num_calls = model.stats()["calls"]
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(30)
    assert num_calls <= 30 + 2 * CONFIG["rookery"]["in_flight"]
    assert report_of(problem)["num_iterations"] == 30


def test_sigterm_ends_with_143_and_the_run_goes_on_and_can_be_extended(problem: Path) -> None:
    with serve_scripted("--latency", 0.3) as model:
        assert stop(problem, signal.SIGTERM, "-i", 16, *model.flags, after=4) == 143
        resumed = subprocess.run(
            [sys.executable, "-m", "rookery", "runs", "resume", "out"],
            cwd=problem, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert resumed.returncode == 0, resumed.stderr
        assert decided(problem) == once(16)
        more = run(problem, "-i", 4, *model.flags)
    assert more.returncode == 0, more.stderr
    assert decided(problem) == once(20)
    page = (problem / "out" / "report.html").read_text()
    assert "The winning line" in page


@pytest.mark.parametrize("workers", [1, 4])
def test_deterministic_runs_give_the_same_bytes(
    problem: Path, tmp_path_factory: pytest.TempPathFactory, workers: int
) -> None:
    with serve_scripted("--latency", 0.02) as model:
        flags = ("-i", 16, "--mode", "deterministic", "--workers", workers, *model.flags)
        ended = run(problem, *flags)
    assert ended.returncode == 0, ended.stderr
    export = [sys.executable, "-m", "rookery", "evolve", "export", "out", "population.jsonl"]
    subprocess.run(export, cwd=problem, check=True, timeout=60, stdout=subprocess.DEVNULL)
    text = (problem / "population.jsonl").read_text()
    assert len(text.splitlines()) == 17
    kept = tmp_path_factory.getbasetemp() / "population.jsonl"
    if kept.exists():
        assert kept.read_text() == text
    kept.write_text(text)


@pytest.fixture
def cluster() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from ray.cluster_utils import Cluster

    node = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 2, "include_dashboard": False, **node}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield started, started.add_node(num_cpus=2, **node)
    finally:
        started.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_lost_ray_node_costs_evaluations_and_no_iteration(problem: Path, cluster: Any) -> None:
    nodes, second = cluster
    with serve_scripted("--latency", 0.3) as model:
        flags = ("--distributed", "--address", nodes.address, "--workers", 4)
        words = command("-i", 40, *model.flags, *flags)
        with subprocess.Popen(
            words, cwd=problem, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            try:
                until(lambda: decided(problem).total() >= 5, process)
                nodes.remove_node(second, allow_graceful=False)
                _, said = process.communicate(timeout=120)
            finally:
                process.kill()
        num_calls = model.stats()["calls"]
    assert process.returncode == 0, said.decode()
    assert decided(problem) == once(40)
    assert num_calls == 40


LETTERS = """# EVOLVE-BLOCK-START
def choose():
    return ["csv", "none", "linear", "text"]
# EVOLVE-BLOCK-END
"""
LETTERS_EVALUATOR = """import runpy

BEST = ["json", "robust", "forest", "table"]

def evaluate(path):
    chosen = runpy.run_path(path)["choose"]()
    right = sum(mine == best for mine, best in zip(chosen, BEST))
    return {"combined_score": right / len(BEST)}
"""
LETTERS_TASK = """Write this Python function again and choose other words. The first word may be
csv, json or xml, the second none or robust, the third linear or forest, the fourth text or table.
```python
{current_program}```"""


def test_smollm2_proposes_in_this_process(problem: Path, capsys: Any) -> None:
    """Four modules with one right choice each: improved or not, every answer is decided."""
    (problem / "program.py").write_text(LETTERS)
    (problem / "evaluator.py").write_text(LETTERS_EVALUATOR)
    (problem / "templates").mkdir()
    (problem / "templates" / "full_rewrite_user.txt").write_text(LETTERS_TASK)
    settings = CONFIG | {
        "diff_based_evolution": False,
        "prompt": {"system_message": "You write Python.", "template_dir": "templates"},
        "llm": {"max_tokens": 96, "temperature": 0.8},
        "rookery": CONFIG["rookery"] | {"engine": {"model": "smollm2"}},
    }
    (problem / "config.yaml").write_text(json.dumps(settings))
    ended = run(problem, "-i", 8)
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(8)
    report = report_of(problem)
    first, best = report["first"]["score"], report["best"]["score"]
    assert best >= first == 0.0
    assert report["tokens"]["completion"] >= 8
    with capsys.disabled():
        verb = f"improved to {best:g}" if best > first else "did not improve"
        sys.stdout.write(f"\nSmolLM2 {verb}; {report['num_failed']} of 8 gave no program\n")


def test_an_adapter_that_learnt_from_a_run_joins_it(problem: Path) -> None:
    """Evolve, export what won, train a small model on it, go on with it beside the first one."""
    (problem / "templates").mkdir()
    (problem / "templates" / "full_rewrite_user.txt").write_text(
        "# Current Program\n```python\n{current_program}```\nReturn another number."
    )
    with serve_scripted("--latency", 0) as model:
        models: list[dict[str, Any]] = [{"name": "scripted", "api_base": model.url}]
        settings = CONFIG | {
            "diff_based_evolution": False,
            "prompt": {"system_message": "You write Python.", "template_dir": "templates"},
            "llm": {"max_tokens": 48, "models": models},
        }
        (problem / "config.yaml").write_text(json.dumps(settings))
        ended = run(problem, "-i", 6)
        assert ended.returncode == 0, ended.stderr
        rookery(problem, "evolve", "export", "out", "--training-data", "wins.jsonl")
        training = ("--split", "all", "--steps", 2, "--layers", 2, "--batch-size", 2)
        rookery(problem, "sft", "smollm2", "wins.jsonl", "adapters/tuned", *training)
        models += [{"name": "base", "weight": 0.5}, {"name": "tuned", "weight": 30.0}]
        own = {"engine": {"model": "smollm2"}, "adapters": {"tuned": "adapters/tuned"}}
        settings["rookery"] = CONFIG["rookery"] | own | {"bandit": True}
        (problem / "config.yaml").write_text(json.dumps(settings))
        ended = run(problem, "-i", 4)
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(10)
    asked = {arm["name"]: arm["num_plays"] for arm in report_of(problem)["models"]}
    assert set(asked) == {"base", "scripted", "tuned"} and sum(asked.values()) == 10
    assert asked["tuned"] >= 1


def rookery(folder: Path, *words: object) -> None:
    line = [sys.executable, "-m", "rookery", *map(str, words)]
    subprocess.run(line, cwd=folder, capture_output=True, timeout=200, check=True)


def test_openevolve_reads_the_same_programs_and_metrics_from_the_same_answers(
    problem: Path, openevolve: OpenEvolve
) -> None:
    with serve_scripted("--latency", 0.02) as model:
        ended = run(problem, "-i", 20, *model.flags)
    assert ended.returncode == 0, ended.stderr
    theirs = openevolve(
        """
import asyncio
from openevolve.config import DatabaseConfig, EvaluatorConfig
from openevolve.database import ProgramDatabase
from openevolve.evaluator import Evaluator
from openevolve.utils.code_utils import apply_diff

database = ProgramDatabase(DatabaseConfig(num_islands=2))
database.load(DATA["checkpoint"])
evaluator = Evaluator(EvaluatorConfig(), DATA["evaluator"], database=database)

async def replay(program):
    [prompt] = program.prompts.values()
    code = apply_diff(database.programs[program.parent_id].code, prompt["responses"][0])
    return [code == program.code, await evaluator.evaluate_program(code, program.id)]

async def main():
    children = [p for p in database.programs.values() if p.parent_id in database.programs]
    return {p.id: await replay(p) for p in children if p.prompts}

answer(asyncio.run(main()))
""",
        {
            "checkpoint": str(problem / "out" / "checkpoints" / "checkpoint_20"),
            "evaluator": str(problem / "evaluator.py"),
        },
    )
    programs = problem / "out" / "checkpoints" / "checkpoint_20" / "programs"
    assert len(theirs) >= 10
    for id, (is_same, metrics) in theirs.items():
        ours = json.loads((programs / f"{id}.json").read_text())
        assert is_same and metrics == ours["metrics"], id


def test_the_scripted_model_answers_alike(problem: Path) -> None:
    """What the tests above stand on: one prompt and seed, one answer."""
    with serve_scripted("--latency", 0) as one, serve_scripted("--latency", 0) as other:
        assert _ask(one) == _ask(one) == _ask(other)


def _ask(model: Scripted) -> str:
    content = f"# Current Program\n```python\n{PROGRAM}```\nSEARCH/REPLACE"
    body = {"messages": [{"role": "user", "content": content}], "seed": 3}
    request = urllib.request.Request(f"{model.url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    assert "REPLACE" in text
    return text
