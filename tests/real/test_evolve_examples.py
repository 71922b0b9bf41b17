"""OpenEvolve's own examples, unmodified: its evaluator gives every program the metrics of our run.

Needs OPENEVOLVE_EXAMPLES (the `examples` folder of a checkout of OpenEvolve) and
ROOKERY_OPENEVOLVE_PYTHON, both with numpy and scipy. Five minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from evolve_command import require_sandbox
from loops.evolve.conftest import OpenEvolve, openevolve, openevolve_python
from scripted import serve_scripted

__all__ = ["openevolve", "openevolve_python"]

pytestmark = pytest.mark.timeout(900)

MATH = "alphaevolve_math_problems"
NAMES = [
    "function_minimization",
    "circle_packing",
    "circle_packing_with_artifacts",
    "k_module_problem",
    "signal_processing",
    f"{MATH}/circle_packing_rect",
    f"{MATH}/heilbronn_triangle",
    f"{MATH}/kissing_number",
    f"{MATH}/minimizing_max_min_dist/2",
]
DRAWS_AT_RANDOM = {"function_minimization", "signal_processing"}
"""Without a seed of their own: only the names of their metrics are compared; a cascade that ends
early has fewer."""
CLOCKS = ("time", "speed", "reliability", "runtime")
MARKER = "# EVOLVE-BLOCK-START"
SCORE = """
import asyncio
from openevolve.config import load_config
from openevolve.evaluator import Evaluator

config = load_config(DATA["config"])
evaluator = Evaluator(config.evaluator, DATA["evaluator"], suffix=".py")

async def main():
    return [await evaluator.evaluate_program(code, str(i)) for i, code in enumerate(DATA["codes"])]

answer(asyncio.run(main()))
"""


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    require_sandbox()
    examples = os.environ.get("OPENEVOLVE_EXAMPLES", "")
    if not examples:
        pytest.skip("OPENEVOLVE_EXAMPLES names no checkout of OpenEvolve")
    return shutil.copytree(Path(examples, request.param), tmp_path / "example")


def answers_for(program: str, *, is_diff: bool) -> list[str]:
    """Programs that compute what the first one does, each with a line of its own."""
    changed = [program.replace(MARKER, f"{MARKER}\nVARIANT = {i}", 1) for i in range(3)]
    if not is_diff:
        return [f"```python\n{text}\n```" for text in changed]
    diff = "<<<<<<< SEARCH\n{0}\n=======\n{0}\nVARIANT = {1}\n>>>>>>> REPLACE"
    return [diff.format(MARKER, i) for i in range(3)]


def comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    """What is neither a clock nor, as k_module_problem has it, an artifact among the metrics."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not any(clock in name for clock in CLOCKS)
    }


@pytest.mark.parametrize("example", NAMES, indirect=True, ids=NAMES)
def test_an_example_runs_as_it_is_and_scores_as_in_openevolve(
    example: Path, openevolve: OpenEvolve, request: pytest.FixtureRequest
) -> None:
    program = next(
        p for p in (example / "initial_program.py", example / "initial.py") if p.exists()
    )
    config = sorted(example.glob("config*.yaml"))[0]
    is_diff = yaml.safe_load(config.read_text()).get("diff_based_evolution", True)
    answers = example / "answers.json"
    answers.write_text(json.dumps(answers_for(program.read_text(), is_diff=is_diff)))
    with serve_scripted("--latency", 0, "--answers", answers) as model:
        words = [
            program,
            example / "evaluator.py",
            "-c",
            config,
            "-o",
            "out",
            "-i",
            3,
            *model.flags,
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "rookery", "evolve", "run", *map(str, words)],
            cwd=example,
            env={**os.environ, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    [checkpoint] = (example / "out" / "checkpoints").iterdir()
    ours = [json.loads(file.read_text()) for file in sorted(checkpoint.glob("programs/*.json"))]
    assert len(ours) >= 2, "the first program and others"
    data = {
        "config": str(config),
        "evaluator": str(example / "evaluator.py"),
        "codes": [each["code"] for each in ours],
    }
    name = request.node.callspec.id
    for mine, theirs in zip(ours, openevolve(SCORE, data), strict=True):
        if name in DRAWS_AT_RANDOM:
            shorter, longer = sorted((mine["metrics"].keys(), theirs.keys()), key=len)
            assert shorter <= longer
        else:
            assert comparable(mine["metrics"]) == comparable(theirs)
