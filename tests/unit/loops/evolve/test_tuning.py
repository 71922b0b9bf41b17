"""Numbers tuned without a model: what is lifted, what is found, how it is counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.test_loop_resume import read_export
from loops.evolve.toy import ToyExecutor, decided_states, evolve_toy, toy_model

from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import EvaluationRequest, FirstProgram
from rookery.loops.evolve.report import export_training_data
from rookery.loops.evolve.tuning import NumberSearch, lift_constants, write_constants
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.sandbox import EvaluationOutcome, Failure
from rookery.types import Job

CODE = """scale = 7.5
# EVOLVE-BLOCK-START
def f(x, näme="ä"):
    a = 0.5 - x * 12
    return a[3] + -1.5e-1 * (x ** 2) + f"{x:3.5}" + True
# EVOLVE-BLOCK-END
other = 8.5
"""


def test_the_numbers_of_the_blocks_are_lifted_and_written_in_their_places() -> None:
    constants = lift_constants(CODE)
    assert [(one.value, one.is_whole) for one in constants] == [
        (0.5, False),
        (12.0, True),
        (0.15, False),
    ]
    assert write_constants(CODE, constants, [one.value for one in constants]) == CODE.replace(
        "1.5e-1", "0.15"
    )
    changed = write_constants(CODE, constants, [-0.25, 9.0, 2.0])
    assert "a = (-0.25) - x * 9\n" in changed and "-2.0 * (x ** 2)" in changed
    assert (
        changed.replace("(-0.25)", "0.5")
        .replace("* 9\n", "* 12\n")
        .replace("2.0 * (", "1.5e-1 * (")
        == CODE
    ), "nothing else"


@pytest.mark.parametrize("code", ["def (", "x = 'text'\ny = 1\n", "", "\0"])
def test_what_has_no_numbers_has_none(code: str) -> None:
    assert lift_constants(code) == ()


def test_a_long_sum_is_no_deep_recursion() -> None:
    assert len(lift_constants("x = " + " + ".join(["0.5"] * 1500))) == 200


def test_a_program_without_blocks_is_tuned_as_a_whole() -> None:
    assert [one.value for one in lift_constants("a = 3\r\nb = 4.0\r\n")] == [3.0, 4.0]


def test_the_search_finds_better_numbers() -> None:
    constants = lift_constants("a = 3.0\nb = -2.0\n")
    search, best = NumberSearch(constants, seed=1, score=None), -100.0
    for _ in range(20):
        scores = [-((a - 4.1) ** 2) - (b - 1.3) ** 2 for a, b in search.ask()]
        best = max(best, *scores)
        search.tell([None, *scores[1:]])
    assert best > -0.01
    alone = NumberSearch(lift_constants("a = 3.0\n"), seed=1, score=None)
    assert all(len(values) == 1 for values in alone.ask())


def test_lists_of_numbers_are_tuned() -> None:
    numbers = ", ".join(f"({0.1 + i / 40}, 0.5)" for i in range(26))
    constants = lift_constants(f"centers = [{numbers}]\n")
    assert len(constants) == 52
    search = NumberSearch(constants, seed=1, score=-13.0)
    best, num = -13.0, 0
    while num < 300:
        scores = [-sum((value - 0.4) ** 2 for value in values) for values in search.ask()]
        best, num = max(best, *scores), num + len(scores)
        search.tell(scores)
    assert best > -0.5, "a few numbers at a time, where CMA-ES has hardly begun"


PROGRAM = "# EVOLVE-BLOCK-START\na = 1.0\nb = 1.0\n# EVOLVE-BLOCK-END\nc = 1.0\n"


def outcome_of(code: str) -> EvaluationOutcome:
    """Best at a = 3, b = 5; a program with an `a` above 6 fails."""
    values: dict[str, Any] = {}
    exec(code, values)  # the program of this test, made of numbers
    a, b = values["a"], values["b"]
    assert values["c"] == 1.0, "outside of the block"
    if a > 6:
        failure = Failure(kind="error", reason="too large")
        return EvaluationOutcome(
            metrics={}, artifacts={}, seconds=0.0, output_tail="", failure=failure
        )
    score = 1 / (1 + (a - 3) ** 2 + (b - 5) ** 2)
    return EvaluationOutcome(
        metrics={"combined_score": score}, artifacts={}, seconds=0.5, output_tail=""
    )


def tune_config(**own: Any) -> EvolveConfig:
    document = {
        "max_iterations": 8,
        "diff_based_evolution": False,
        "evolution_trace": {"enabled": True},
        "rookery": {"in_flight": 4, "workers": 2, "tune": {"evaluations": 40}, **own},
    }
    return EvolveConfig.model_validate(document)


async def run_toy(folder: Path, config: EvolveConfig, executor: ToyExecutor) -> EvolveReport:
    def same(_: object) -> str:
        return f"```python\n{PROGRAM.replace('1.0', '1.1', 1)}```"

    return await evolve_toy(
        folder,
        config,
        programs=[FirstProgram(code=PROGRAM, language="python", suffix=".py")],
        models={"toy": toy_model(same)},
        executor=executor,
    )


def check_counted(report: EvolveReport, executor: ToyExecutor) -> None:
    tunings = [num for num in Counter(job.attempt for job in executor.jobs).values() if num > 1]
    assert tunings and set(tunings) <= {40, 41}, "what is asked for, and the best once more"
    assert report.num_tuning_evaluations == 40 * len(tunings)
    num_failed = sum(code_fails(job) for job in executor.jobs)
    seconds = 0.5 * (len(executor.jobs) - num_failed)
    assert report.evaluation_seconds == pytest.approx(seconds), "all of them"


def code_fails(job: Job) -> bool:
    return outcome_of(EvaluationRequest.decode(job.payload).code).failure is not None


async def test_every_new_best_is_tuned_once_as_a_child_of_its_own(tmp_path: Path) -> None:
    executor = ToyExecutor(outcome_of)
    report = await run_toy(tmp_path, tune_config(), executor)
    check_counted(report, executor)
    assert report.best is not None and (report.best.score or 0) > 0.8
    assert report.num_iterations == 8
    line = report.winning_line
    assert line[0].id == "first1" and line[-1].parent == line[-2].id
    assert "-a = 1" in line[1].diff and "+a = " in line[1].diff
    rows = {row.name: row for row in report.operators}
    assert rows["tune"].tokens == 0 and rows["tune"].num_improved >= 1
    assert all(
        states[-1] in {"committed", "failed"} for states in decided_states(tmp_path).values()
    )
    with Run.view(tmp_path / "toy") as view:
        assert '"operator": "tune"' in read_export(tmp_path)
        rows_of_answers = export_training_data(view, features=[]).splitlines()
        assert all(json.loads(row)["model"] == "toy" for row in rows_of_answers)
        tunings = [
            event.payload["data"]["plan"]["parent"]
            for event in view.events("attempt")
            if event.payload["state"] == "planned"
            and event.payload["data"]["plan"]["operator"] == "tune"
        ]
    assert len(set(tunings)) == len(tunings), "none twice"


async def test_the_result_of_a_tuning_is_tuned_while_that_gains(tmp_path: Path) -> None:
    config = tune_config(tune={"evaluations": 8}, in_flight=1)
    report = await run_toy(tmp_path, config, ToyExecutor(outcome_of))
    with Run.view(tmp_path / "toy") as view:
        plans = [
            event.payload["data"]["plan"]
            for event in view.events("attempt")
            if event.payload["state"] == "planned"
        ]
    tunings = {f"p{plan['attempt']}" for plan in plans if plan["operator"] == "tune"}
    assert tunings & {plan["parent"] for plan in plans if plan["operator"] == "tune"}
    assert report.num_tuning_evaluations == 8 * len(tunings) < 8 * report.num_iterations


async def test_tuning_is_deterministic(tmp_path: Path) -> None:
    for workers in (1, 4):
        own = {"mode": "deterministic", "lag": 2, "workers": workers}
        await run_toy(tmp_path / str(workers), tune_config(**own), ToyExecutor(outcome_of))
    assert read_export(tmp_path / "1") == read_export(tmp_path / "4")


async def test_numbers_that_are_best_already_are_a_failed_attempt(tmp_path: Path) -> None:
    def flat(_: str) -> EvaluationOutcome:
        return EvaluationOutcome(
            metrics={"combined_score": 0.5}, artifacts={}, seconds=0.0, output_tail=""
        )

    report = await run_toy(tmp_path, tune_config(), ToyExecutor(flat))
    failures = {failure.kind: failure for failure in report.failures}
    assert "None of 40 programs with other numbers is better" in failures["not_tuned"].first_message
    assert (failures["not_tuned"].count, report.num_tuning_evaluations) == (1, 40)


async def test_baselines_are_tuned_where_they_say_so(tmp_path: Path) -> None:
    config = tune_config(baselines=["sequential", "sequential+tune"])
    report = await run_toy(tmp_path, config, ToyExecutor(outcome_of))
    plain, tuned = report.baselines
    assert (plain.name, plain.num_tuning_evaluations) == ("sequential", 0)
    assert tuned.name == "sequential+tune" and tuned.num_tuning_evaluations >= 40
    assert (tuned.best or 0) > (plain.best or 0)
    with pytest.raises(ValueError, match="tune is not set"):
        EvolveConfig.model_validate({"rookery": {"baselines": ["sequential+tune"]}})


async def test_fast_programs_are_scored_more_often_where_seconds_allow(tmp_path: Path) -> None:
    own = {"tune": {"evaluations": 4, "seconds": 6.0}}
    executor = ToyExecutor(outcome_of, delay_s=lambda _: 0.001)
    await run_toy(tmp_path, tune_config(**own), executor)
    jobs = Counter(job.attempt for job in executor.jobs)
    assert jobs[1] in (13, 14), "half a second each, and some fail at once"
    order = [job.attempt for job in executor.jobs]
    last = max(place for place, number in enumerate(order) if number == 1)
    later = {number for number in order[:last] if number > 1}
    assert later and max(later) <= 5, "meanwhile, `in_flight` iterations"
    with pytest.raises(ValueError, match="what a clock ends is not repeatable"):
        tune_config(mode="deterministic", **own)
