"""evolve as a user runs it: the command, a model over HTTP, the sandbox, signals. Seconds, and
with ROOKERY_LONG four minutes.

Without a sandbox the tests skip with the reason; under CI they fail.
"""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evolve_command import (
    CONFIG,
    decided,
    once,
    report_of,
    require_sandbox,
    run,
    stop,
    write_problem,
)
from marks import long
from scripted import serve_scripted
from tests.real.peers import needs_vllm, served_on_cpu
from tiny import write_chat_model

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    require_sandbox()


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    return write_problem(tmp_path)


def test_a_run_of_hostile_programs_that_is_killed_decides_all_of_them_once(problem: Path) -> None:
    """By kill -9, in the middle; the rest is done by --resume."""
    with serve_scripted("--latency", 0.05, "--hostile", 0.5) as model:
        words: tuple[object, ...] = ("-i", 24, *model.flags)
        assert stop(problem, signal.SIGKILL, *words, after=8) == -signal.SIGKILL
        before = decided(problem)
        assert 8 <= before.total() < 24
        ended = run(problem, *words, "--resume")
        num_calls = model.stats()["calls"]
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(24)
    assert 24 <= num_calls <= 24 + CONFIG["rookery"]["in_flight"], "an answer is paid once"
    report = report_of(problem)
    kinds = {failure["kind"] for failure in report["failures"]}
    assert report["num_failed"] + report["num_committed"] == 24
    assert report["num_failed"] >= 4 and len(kinds) >= 2, kinds
    assert report["best"]["score"] > 0.25
    assert not Path("/etc/rookery-was-here").exists()
    assert "return" in (problem / "out" / "best" / "best_program.py").read_text()


def finish(folder: Path, *words: object) -> bytes:
    """Run to the end; the bytes of the export."""
    ended = run(folder, *words)
    assert ended.returncode == 0, ended.stderr
    rookery(folder, "evolve", "export", "out", "population.jsonl")
    return (folder / "population.jsonl").read_bytes()


@long
@pytest.mark.timeout(900)
def test_a_deterministic_run_that_is_stopped_twice_exports_the_same_bytes(tmp_path: Path) -> None:
    """By SIGTERM, with any number of workers."""

    def words(workers: int) -> tuple[object, ...]:
        return ("-i", 24, "--mode", "deterministic", "--workers", workers, *model.flags)

    with serve_scripted("--latency", 0.1) as model:
        undisturbed = finish(write_problem(tmp_path / "undisturbed"), *words(2))
        assert undisturbed.count(b"\n") == 25
        for workers in (1, 4, 16):
            folder, rng = write_problem(tmp_path / str(workers)), random.Random(workers)
            flags = words(workers)
            after = rng.randrange(1, 10)
            assert stop(folder, signal.SIGTERM, *flags, after=after) == 143
            after = decided(folder).total() + rng.randrange(1, 5)
            assert after < 24
            assert stop(folder, signal.SIGTERM, *flags, "--resume", after=after) == 143
            assert finish(folder, *flags, "--resume") == undisturbed
            assert decided(folder) == once(24)


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


@long
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
    ended = run(problem, "-i", 4)
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(4)
    report = report_of(problem)
    first, best = report["first"]["score"], report["best"]["score"]
    assert best >= first == 0.0
    assert report["tokens"]["completion"] >= 4
    with capsys.disabled():
        verb = f"improved to {best:g}" if best > first else "did not improve"
        sys.stdout.write(f"\nSmolLM2 {verb}; {report['num_failed']} of 4 gave no program\n")


@long
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


@long
@pytest.mark.timeout(900)
@needs_vllm
def test_an_adapter_is_trained_and_served_by_vllm_while_a_run_goes_on(problem: Path) -> None:
    """A run that is killed after the training goes on with the adapter that it has."""
    write_chat_model(problem / "model", hidden_size=128, intermediate_size=128)
    (problem / "templates").mkdir()
    (problem / "templates" / "diff_user.txt").write_text(
        "# Current Program\n```python\n{current_program}```\nWrite a SEARCH/REPLACE block."
    )
    sizes = {"max_model_len": 1024, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 16}
    launch = served_on_cpu(problem / "model", **sizes)
    own = {
        "engine": {"type": "fleet", "launch": launch},
        "learn": {"every": 20, "epochs": 1},
        "mode": "deterministic",  # waits for the training
    }
    with serve_scripted("--latency", 0.05) as model:
        models = [{"name": "scripted", "api_base": model.url}, {"name": "base", "weight": 0.1}]
        settings = CONFIG | {
            "prompt": {"system_message": "You write Python.", "template_dir": "templates"},
            "llm": {"max_tokens": 16, "models": models},
            "rookery": CONFIG["rookery"] | own,
        }
        (problem / "config.yaml").write_text(json.dumps(settings))
        stop(problem, signal.SIGKILL, "-i", 45, after=30, limit_s=400)
        ended = run(problem, "-i", 45, "--resume", timeout_s=400)
    assert ended.returncode == 0, ended.stderr
    assert decided(problem) == once(45)
    report = report_of(problem)
    joined = [row for row in report["learned"] if not row["error"]]
    assert joined and joined[0]["num_rows"] >= 4 and joined[0]["tokens"] > 0
    asked = {arm["name"]: arm["num_plays"] for arm in report["models"]}
    assert asked[joined[0]["name"]] >= 1 and sum(asked.values()) == 45


def rookery(folder: Path, *words: object) -> None:
    line = [sys.executable, "-m", "rookery", *map(str, words)]
    subprocess.run(line, cwd=folder, capture_output=True, timeout=200, check=True)
