"""Functions written out as the numbers that they return, and the tuning of these."""

import asyncio
import contextlib
import io
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import ToyExecutor, evolve_toy, toy_model

from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import EvaluationRequest, FirstProgram
from rookery.loops.evolve.tuning import TuneLimit, Variant, tune
from rookery.loops.evolve.tuning.tables import (
    add_reports,
    find_functions,
    read_reports,
    write_tables,
)
from rookery.sandbox import EvaluationOutcome, Failure, encode_outcome
from rookery.types import Job, JobDone, JobOutcome, TextRequest

CODE = '''"""Points."""
import math
import numpy as np


# EVOLVE-BLOCK-START
def layout():
    """Where they are."""
    return [(math.cos(i), 0.5) for i in range(3)]


def rest():
    total = 1.0
    return np.ones(2) * total, [total]


def one():
    return rest()[0]


def table(): return [0.5, 0.25]


def top():
    return [x for x, _ in layout()] + list(one()) + [y for _, y in layout()]


# EVOLVE-BLOCK-END
'''


def run(code: str) -> tuple[Any, str]:
    """What `top` returns, and what it prints."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)  # the program of this test
        value = [float(each) for each in names["top"]()]
    return value, printed.getvalue()


def write_out(code: str) -> str:
    names = find_functions(code)
    if not names:
        return code
    return write_tables(code, read_reports(run(add_reports(code, names))[1], code, names))


def test_the_innermost_functions_without_arguments_are_written_out() -> None:
    assert find_functions(CODE) == ("layout", "rest")
    assert find_functions(CODE.replace("rest()[0]", "np.zeros(2)")) == ("layout", "one")
    written = write_out(CODE)
    assert "    return [(1.0, 0.5),\n        (0.540302306, 0.5),\n" in written
    assert "    return (np.array([1.0, 1.0]), [1.0])\n" in written
    assert '"""Where they are."""' in written and run(written)[0] == pytest.approx(run(CODE)[0])
    assert find_functions(written) == ("one",), "no table again"


def test_marked_blocks_alone_are_changed() -> None:
    outside = CODE.replace("# EVOLVE-BLOCK-START\n", "").replace(
        "def one", "# EVOLVE-BLOCK-START\ndef one"
    )
    assert find_functions(outside) == ("one",)


@pytest.mark.parametrize(
    "body",
    [
        "import random; return [random.random()]",
        "return 'text'",
        "return [True]",
        "return {'a': 1.0}",
        "return [float('inf')]",
        "return [0.5 * i for i in range(300)]",
        "yield 0.5",
        "print('rookery-table other [0.5]'); return 'text'",
        "print('\\nrookery-table layout [exit()]'); return 0.5 + 1",
    ],
)
def test_what_is_not_always_the_same_few_numbers_stays(body: str) -> None:
    code = (
        f"def layout():\n    {body}\n\ndef top():\n    return [0.0] if layout() == layout() else []"
    )
    assert write_out(code) == code


@pytest.mark.parametrize("code", ["def (", "", "\0", "def f(): return 3\ndef g(): return f()"])
def test_a_program_without_such_functions_has_none(code: str) -> None:
    assert find_functions(code) == ()


TOP = "\ndef top():\n    return layout()\n"


@pytest.mark.parametrize(
    "code",
    [
        "def layout():\n    @staticmethod\n    def f(x): return x\n    return [len('ab') * 0.5]",
        "def layout():\n\t\"Text.\"\n\treturn [len('ab') * 0.5]",
        "def layout():\r\n    x = 1.0\r\n    return [x]",
    ],
)
def test_a_table_is_a_program_again(code: str) -> None:
    written = write_out(code + TOP)
    assert "return [1.0]" in written and run(written)[0] == [1.0]


def test_a_function_with_lines_that_are_not_open_stays() -> None:
    start, end = "# EVOLVE-BLOCK-START\n", "# EVOLVE-BLOCK-END\n"
    code = f"{start}def layout():\n    x = 3\n{end}    x += 1\n{start}    return [x]\n{TOP}{end}"
    assert find_functions(code) == ()


def test_long_sums_and_many_functions_are_no_deep_or_long_search() -> None:
    many = "".join(f"def f{i}(): return 1\n" for i in range(3000))
    code = "def layout():\n    return " + " + ".join(["0.5"] * 1500) + TOP
    assert find_functions(many + code) == ("layout",)


@pytest.mark.parametrize(
    ("printed", "is_table"),
    [
        ("[0.5]", True),
        ("[0.5]\nrookery-table layout [0.5]", True),  # loaded twice, as cascades do
        ("[0.5]\nrookery-table layout other", False),
        ("other", False),
        ("[0.5] # EVOLVE-BLOCK-END", False),
        ("-" * 3000 + "1", False),
        ("np.zeros([5])", False),
        ("(np.array([0.5, -2]),)", True),
    ],
)
def test_what_is_printed_is_read_as_a_table(printed: str, is_table: bool) -> None:
    output = f"before\nrookery-table layout {printed}\n"
    assert bool(read_reports(output, CODE, ["layout"])) == is_table


def test_the_end_of_what_is_printed_tells_that_calls_differ() -> None:
    code = "import itertools\nnumber = itertools.count()\ndef layout():\n    return [next(number)]"
    code += "\ndef top():\n    return layout() + layout()"
    last = run(add_reports(code, ["layout"]))[1].strip().split("\n")[-1]
    assert read_reports(last, code, ["layout"]) == {}


GOAL = (0.1, 0.4, 0.9)


def score_of(code: str) -> float:
    numbers = run(code)[0]
    distance: float = sum(abs(x - y) for x, y in zip(numbers, GOAL, strict=False))
    return -distance - abs(len(numbers) - 8)


async def test_tables_are_tuned_with_most_of_the_evaluations() -> None:
    limit = TuneLimit(evaluations=200)

    async def score(codes: Sequence[str]) -> list[float | None]:
        limit.num += len(codes)
        return [score_of(code) for code in codes]

    async def report(code: str) -> str:
        limit.num += 1
        return run(code)[1]

    first = Variant(CODE, score_of(CODE))
    tuned = await tune(first, score=score, run=report, seed=1, limit=limit)
    assert limit.num == 200
    assert tuned.score is not None and tuned.score == score_of(tuned.code) > -0.6
    assert "cos" not in tuned.code and "cos" in tuned.source, "what a model is shown"


class PrintingExecutor(ToyExecutor):
    """Runs `top`, alone or several in one job. The score is how near its numbers are to a goal."""

    def __init__(self, *, remembers: float = 0, noise: float = 0, fails: str = "") -> None:
        super().__init__()
        self._remembers = remembers
        self._fails = fails
        self._noise = noise
        self.num_together = 0

    async def submit(self, job: Job) -> JobOutcome:
        self.jobs.append(job)
        request = EvaluationRequest.decode(job.payload)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        self.num_together += len(request.variants)
        if request.variants and self._fails == "together":
            return failed(seconds=0.01)
        if not request.variants and self._fails == "slowly" and len(self.jobs) % 3 == 2:
            return failed(seconds=5.0)
        if not request.variants:
            luck = self._noise * random.Random(len(self.jobs)).random()
            score = score_of(request.code) + luck
            # A change of code changes the time too.
            seconds = 0.01 + 1e-6 * len(request.code)
            return done({"combined_score": score}, seconds=seconds, printed=run(request.code)[1])
        lines = [
            [
                {"begin": "evaluation"},
                {
                    "stage": "evaluation",
                    "metrics": {"combined_score": score_of(code) + number * self._remembers},
                    "artifacts": {},
                },
                {"done": True, "unsupported": ""},
            ]
            for number, code in enumerate(request.variants)
        ]
        return done({}, variants=json.dumps(lines))


def done(
    metrics: dict[str, float], *, seconds: float = 0.01, printed: str = "", **artifacts: str
) -> JobDone:
    outcome = EvaluationOutcome(
        metrics=metrics, artifacts=artifacts, seconds=seconds, output_tail=printed
    )
    return JobDone(output=encode_outcome(outcome), seconds=0.0, worker="toy")


def failed(*, seconds: float) -> JobDone:
    failure = Failure(kind="timeout", reason="It took too long.")
    outcome = EvaluationOutcome(
        metrics={}, artifacts={}, seconds=seconds, output_tail="", failure=failure
    )
    return JobDone(output=encode_outcome(outcome), seconds=0.0, worker="toy")


async def evolve(folder: Path, executor: PrintingExecutor, **own: Any) -> tuple[Any, list[str]]:
    """Two iterations: a tuning and an answer. Returns the report and the prompts."""
    prompts: list[str] = []

    def answer(request: TextRequest) -> str:
        prompts.append(request.messages[-1].content)
        return f"```python\n{CODE.replace('cos(i)', f'sin(i + {len(prompts)})')}```"

    document = {
        "max_iterations": own.pop("max_iterations", 3),
        "diff_based_evolution": False,
        "rookery": {"in_flight": 1, "workers": 3, "tune": {"evaluations": 120}, **own},
    }
    config = EvolveConfig.model_validate(document)
    first = FirstProgram(code=CODE, language="python", suffix=".py")
    model = toy_model(answer)
    report = await evolve_toy(folder, config, programs=[first], model=model, executor=executor)
    return report, prompts


async def test_a_model_is_shown_the_program_before_its_tables(tmp_path: Path) -> None:
    executor = PrintingExecutor()
    report, prompts = await evolve(tmp_path, executor, tune={"evaluations": 400})
    assert "return [(" in report.winning_line[1].diff
    assert prompts and all("cos" in prompt for prompt in prompts)
    assert executor.num_together > 60, "scored many at a time"
    assert executor.most_running > 1


async def test_a_program_that_remembers_is_scored_in_jobs_of_its_own(tmp_path: Path) -> None:
    for remembers in (1, -1):
        executor = PrintingExecutor(remembers=remembers)
        report, _ = await evolve(tmp_path / str(remembers), executor)
        assert 0 < executor.num_together < 40
        assert report.best is not None and (report.best.score or 0) <= 0.0


async def test_jobs_that_fail_together_are_soon_not_shared(tmp_path: Path) -> None:
    executor = PrintingExecutor(fails="together")
    report, _ = await evolve(tmp_path, executor)
    assert 0 < executor.num_together < 40 and report.num_tuning_evaluations >= 120


async def test_programs_that_fail_slowly_share_no_job(tmp_path: Path) -> None:
    executor = PrintingExecutor(fails="slowly")
    report, _ = await evolve(tmp_path, executor, max_iterations=1)
    assert report.num_tuning_evaluations > 100
    assert executor.num_together == 0


async def test_a_deterministic_run_scores_each_in_a_job_of_its_own(tmp_path: Path) -> None:
    executor = PrintingExecutor()
    await evolve(tmp_path, executor, mode="deterministic")
    assert executor.num_together == 0


async def test_a_model_is_never_shown_the_tables_of_a_second_tuning(tmp_path: Path) -> None:
    """It writes out `one`, which called a function that was written out by the first."""
    executor = PrintingExecutor()
    tune = {"evaluations": 200, "seconds": 2.0}
    _, prompts = await evolve(tmp_path, executor, tune=tune, max_iterations=8)
    assert sum("rookery-table" in str(job.payload) for job in executor.jobs) > 2
    assert prompts and not any(re.search(r"\[\(\d|np.array\(", prompt) for prompt in prompts)


async def test_all_evaluations_of_children_are_counted_once(tmp_path: Path) -> None:
    executor = PrintingExecutor(noise=30.0)
    tune = {"evaluations": 40, "children": 80}
    report, _ = await evolve(tmp_path, executor, tune=tune, max_iterations=8)
    requests = [EvaluationRequest.decode(job.payload) for job in executor.jobs]
    seconds = [0.01 + 1e-6 * len(each.code) * (not each.variants) for each in requests]
    assert report.evaluation_seconds == pytest.approx(sum(seconds), abs=1e-9)
    num = sum(max(1, len(each.variants)) for each in requests)
    assert 0 < num - report.num_tuning_evaluations <= 2 * 9, "first, and once more when tuned"


async def test_children_are_tuned_before_they_count(tmp_path: Path) -> None:
    """Their numbers are bad, their idea is good."""
    executor = PrintingExecutor()
    tune = {"evaluations": 40, "children": 80}
    report, _ = await evolve(tmp_path, executor, tune=tune)
    rows = {row.name: row for row in report.operators}
    assert any(row.num_improved for name, row in rows.items() if name != "tune")
    failures = {failure.kind for failure in report.failures}
    assert "repeated" not in failures
