"""OpenEvolve 0.4 scores the programs of our runs as we do, for evaluators of every kind.

Needs ROOKERY_OPENEVOLVE_PYTHON (`make test-real`). A minute.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from evolve_command import require_sandbox, run, write_problem
from loops.evolve.conftest import OpenEvolve, openevolve, openevolve_python
from scripted import serve_scripted

__all__ = ["openevolve", "openevolve_python"]

pytestmark = pytest.mark.timeout(240)

SOLVE = """import runpy

def solve(path):
    return runpy.run_path(path)["solve"]()
"""
PLAIN = """
def evaluate(path):
    score = solve(path)
    return {"combined_score": score, "half": score / 2, "is_high": score > 0.5}
"""
WITHOUT_COMBINED_SCORE = """
def evaluate(path):
    score = solve(path)
    return {"speed": score, "size": 1 - score / 4}
"""
RESULT = """
from openevolve.evaluation_result import EvaluationResult

def evaluate(path):
    score = solve(path)
    return EvaluationResult({"combined_score": score}, {"note": f"got {score}", "raw": b"\\x00ab"})
"""
CASCADE = """
def evaluate_stage1(path):
    return {"combined_score": solve(path), "stage1": 1.0}

def evaluate_stage2(path):
    return {"combined_score": solve(path) ** 0.5, "stage2": 2}

def evaluate_stage3(path):
    return {"stage3": 3.0}

def evaluate(path):
    return {"never": 0.0}
"""
CASCADE_RESULT = """
from openevolve.evaluation_result import EvaluationResult

def evaluate_stage1(path):
    return EvaluationResult({"combined_score": solve(path)}, {"first": "stage 1 ran"})

def evaluate_stage2(path):
    return EvaluationResult({"quality": solve(path) / 3}, {"second": "stage 2 ran"})

def evaluate(path):
    return evaluate_stage1(path)
"""
COROUTINE = """
import asyncio

async def evaluate(path):
    await asyncio.sleep(0)
    return {"combined_score": solve(path)}
"""
EVALUATORS = {
    "plain": PLAIN,
    "without combined_score": WITHOUT_COMBINED_SCORE,
    "EvaluationResult": RESULT,
    "cascade": CASCADE,
    "cascade of EvaluationResult": CASCADE_RESULT,
}
REPLAY = """
import asyncio, json
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
    metrics = await evaluator.evaluate_program(code, "again")
    found = evaluator.get_pending_artifacts("again") or {}
    return {
        "is_same_code": code == program.code,
        "metrics": metrics,
        "artifacts": json.loads(json.dumps(found, default=database._artifact_serializer)),
        "kept": database.get_artifacts(program.id),
    }

async def main():
    children = [p for p in database.programs.values() if p.parent_id in database.programs]
    return {p.id: await replay(p) for p in children if p.prompts}

answer(asyncio.run(main()))
"""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    require_sandbox()
    return write_problem(tmp_path)


def replay(problem: Path, evaluator: str, openevolve: OpenEvolve) -> dict[str, Any]:
    """What OpenEvolve makes of the answers that our run was given, by the program's id."""
    (problem / "evaluator.py").write_text(SOLVE + evaluator)
    with serve_scripted("--latency", 0.02) as model:
        ended = run(problem, "-i", 20, *model.flags)
    assert ended.returncode == 0, ended.stderr
    checkpoint = problem / "out" / "checkpoints" / "checkpoint_20"
    data = {"checkpoint": str(checkpoint), "evaluator": str(problem / "evaluator.py")}
    theirs: dict[str, Any] = openevolve(REPLAY, data)
    assert len(theirs) >= 5  # some answers repeat a program
    return theirs


def metrics_of(problem: Path, id: str) -> dict[str, Any]:
    programs = problem / "out" / "checkpoints" / "checkpoint_20" / "programs"
    metrics: dict[str, Any] = json.loads((programs / f"{id}.json").read_text())["metrics"]
    return metrics


@pytest.mark.parametrize("kind", EVALUATORS)
def test_the_same_answers_give_the_same_programs_metrics_and_artifacts(
    problem: Path, openevolve: OpenEvolve, kind: str
) -> None:
    theirs = replay(problem, EVALUATORS[kind], openevolve)
    for id, found in theirs.items():
        assert found["is_same_code"], id
        assert found["metrics"] == metrics_of(problem, id), id
        assert found["artifacts"] == found["kept"], id
    if kind == "cascade":
        reached = [{"stage2", "stage3"} & found["metrics"].keys() for found in theirs.values()]
        assert {len(stages) for stages in reached} >= {0, 2}, "some stopped early, some did not"


def test_a_coroutine_is_awaited_where_openevolve_scores_an_error(
    problem: Path, openevolve: OpenEvolve
) -> None:
    for id, found in replay(problem, COROUTINE, openevolve).items():
        assert found["is_same_code"] and "combined_score" not in found["metrics"]
        score = metrics_of(problem, id)["combined_score"]
        assert isinstance(score, float) and score > 0
