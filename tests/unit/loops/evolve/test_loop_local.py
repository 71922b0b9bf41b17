"""The evolve loop on worker processes with real evaluators, without a sandbox."""

import asyncio
from pathlib import Path

import pytest
from loops.evolve.toy import FIRST, evolve_toy, toy_config, toy_model

from rookery.executors import open_local
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import (
    FirstProgram,
    evaluation_spec,
    read_first_program,
)
from rookery.reports import EvolveReport
from rookery.testing import FakeTextModel
from rookery.types import TextRequest

EVALUATOR = """
import os
import limits

def evaluate(path):
    text = open(path).read()
    if "EXIT" in text:
        os._exit(1)
    if "NAN" in text:
        return {"combined_score": float("nan")}
    if "TEXT" in text:
        return "good"
    if "LOOP" in text:
        while True:
            pass
    x = {}
    exec(text, x)
    return {"combined_score": min(1.0, x["x"] / limits.HIGHEST)}
"""

ANSWERS = {
    1: "x = 7  # NAN",
    2: "x = 2  # TEXT",
    3: "x = 3  # LOOP",
    4: "x = 4\nraise ValueError('no')",
    5: "x = 50",
    6: "x = ",
    7: "x = 8  # EXIT",
}


def unsafe_config(**values: object) -> EvolveConfig:
    return toy_config(
        rookery={"sandbox": {"backend": "none"}, "in_flight": 2, "workers": 2},
        evaluator={"timeout": 1.0},
        **values,
    )


@pytest.fixture
def evaluator(tmp_path: Path) -> Path:
    """An evaluator with a module beside it, which travels along."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "limits.py").write_text("HIGHEST = 100\n")
    (folder / "evaluator.py").write_text(EVALUATOR)
    return folder / "evaluator.py"


async def evolve_local(
    folder: Path,
    config: EvolveConfig,
    evaluator: Path,
    model: FakeTextModel,
    *,
    first: FirstProgram = FIRST,
    num_workers: int = 2,
) -> EvolveReport:
    spec = await asyncio.to_thread(evaluation_spec, config, evaluator=evaluator, first=first)
    async with open_local(spec, num_workers=num_workers) as executor:
        return await evolve_toy(
            folder, config, programs=[first], models={"toy": model}, executor=executor
        )


async def test_real_workers_score_programs_and_report_their_failures(
    tmp_path: Path, evaluator: Path
) -> None:
    order = iter(range(1, 8))

    def reply(_: TextRequest) -> str:
        return f"```python\n{ANSWERS[next(order)]}\n```"

    config = unsafe_config(max_iterations=7)
    result = await evolve_local(tmp_path, config, evaluator, FakeTextModel(reply, name="toy"))
    kinds = {failure.kind: failure.count for failure in result.failures}
    assert kinds == {"not_finite": 1, "not_a_dict": 1, "timeout": 1, "error": 2, "crash": 1}
    assert result.best is not None
    assert result.best.code.strip() == "x = 50"
    assert result.best.metrics == {"combined_score": 0.5}
    assert result.num_committed == 1
    assert any("without a sandbox" in warning for warning in result.warnings)


async def test_files_without_markers_stand_beside_those_that_are_evolved(tmp_path: Path) -> None:
    """In what is scored, and in `best/`; a model does not see them."""
    program, task = tmp_path / "program", tmp_path / "task"
    (program / "data").mkdir(parents=True)
    task.mkdir()
    (program / "main.py").write_text("# EVOLVE-BLOCK-START\nx = 1\n# EVOLVE-BLOCK-END\n")
    (program / "data" / "factor.txt").write_text("2.0\n")
    (task / "evaluator.py").write_text(
        "import runpy\n"
        "def evaluate(path):\n"
        "    factor = float(open(path + '/data/factor.txt').read())\n"
        "    return {'combined_score': factor * runpy.run_path(path + '/main.py')['x']}\n"
    )
    config = unsafe_config(max_iterations=1)
    first = read_first_program(program, config=config)
    model = FakeTextModel(lambda _: "main.py\n```python\nx = 3\n```", name="toy")
    evaluator = task / "evaluator.py"
    result = await evolve_local(tmp_path, config, evaluator, model, first=first)
    assert result.best is not None
    assert result.best.metrics == {"combined_score": 6.0}
    assert "factor" not in model.requests[0].messages[-1].content
    best = tmp_path / "toy" / "best" / "best_program"
    files = {path.relative_to(best).as_posix() for path in best.rglob("*") if path.is_file()}
    assert files == {"main.py", "data/factor.txt"}


async def test_random_scores_are_the_same_for_any_number_of_workers(
    tmp_path: Path, evaluator: Path
) -> None:
    """Of an evaluator and a program that draw without a seed."""
    text = "import random, runpy\ndef evaluate(path):\n"
    text += " return {'combined_score': random.random() + runpy.run_path(path)['draw']()}"
    await asyncio.to_thread(evaluator.write_text, text)
    program = "import random\ndraw = random.random\nx = {}\n"
    first = FirstProgram(code=program.format(1), language="python", suffix=".py")
    curves = []
    for num_workers in (1, 2):
        model = toy_model(lambda request: f"```python\n{program.format(request.seed)}```")
        own = {"sandbox": {"backend": "none"}, "mode": "deterministic", "workers": num_workers}
        config = toy_config(max_iterations=6, random_seed=3, rookery=own)
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        result = await evolve_local(
            folder, config, evaluator, model, first=first, num_workers=num_workers
        )
        assert not result.is_forgeable
        curves.append([(point.iteration, point.best) for point in result.curve])
    assert curves[0] == curves[1] and len({score for _, score in curves[0]}) > 1


async def test_an_evaluator_that_needs_one_process_gets_it_and_the_report_says_so(
    tmp_path: Path, evaluator: Path
) -> None:
    text = "import runpy\ndef evaluate(path):\n"
    text += " return {'combined_score': float(runpy.run_path(path)['box'])}"
    await asyncio.to_thread(evaluator.write_text, text)
    code = "class Box:\n def __float__(self): return 0.25\nbox = Box()\nx = 1\n"
    first = FirstProgram(code=code, language="python", suffix=".py")
    own = {"sandbox": {"backend": "none", "isolate": "auto"}, "workers": 2}
    config = toy_config(max_iterations=2, rookery=own)
    model = toy_model(lambda request: f"```python\n{code.replace('0.25', '0.5')}```")
    result = await evolve_local(tmp_path, config, evaluator, model, first=first)
    assert result.best is not None
    assert result.best.metrics == {"combined_score": 0.5}
    assert result.is_forgeable
    assert any("forge its score" in warning for warning in result.warnings)
