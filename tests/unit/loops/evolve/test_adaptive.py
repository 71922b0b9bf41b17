"""The adaptive strategy in the whole loop: when it is the default, repair, its report."""

from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import ToyExecutor, evolve_toy, number_in, toy_config, toy_model

from rookery.compat.openevolve import read_checkpoint, read_config
from rookery.loops.evolve.search_state import search_config
from rookery.sandbox import Failure, Outcome
from rookery.types import TextRequest


@pytest.mark.parametrize(
    ("database", "strategy"),
    [
        ({}, "adaptive"),
        ({"log_prompts": False, "random_seed": 7}, "adaptive"),
        ({"num_islands": 5}, "openevolve"),
        ({"feature_bins": 10}, "openevolve"),
        ({"num_islands": 3, "strategy": "adaptive"}, "adaptive"),
        ({"strategy": "openevolve"}, "openevolve"),
        ({"strategy": None}, "adaptive"),
    ],
)
def test_openevolves_keys_choose_its_strategy(database: dict[str, Any], strategy: str) -> None:
    config = read_config({"database": database}, environment={}).config
    assert config.database.strategy == strategy
    document = config.model_dump(mode="json")
    assert toy_config(database=document["database"]).database.strategy == strategy
    of_an_earlier_version = {k: v for k, v in document["database"].items() if k != "strategy"}
    assert toy_config(database=of_an_earlier_version).database.strategy == "openevolve"


def test_grid_and_archive_fit_the_iterations() -> None:
    sizes = {
        num: (search_config(toy_config(max_iterations=num, database={})))
        for num in (20, 400, 10_000)
    }
    assert [sizes[num].archive_size for num in sizes] == [10, 40, 100]
    assert [sizes[num].bins for num in sizes] == [(4, 4), (7, 7), (10, 10)]
    old = search_config(toy_config(max_iterations=20, database={"strategy": "openevolve"}))
    assert (old.archive_size, old.bins, old.migration_interval) == (100, (10, 10), 50)


def toy_with_bugs(code: str) -> Outcome:
    """As an evaluator that a program with a bug does not get through."""
    x = number_in(code)
    if "BUG" in code:
        failure = Failure(
            kind="error",
            reason="name 'np' is not defined",
            type="NameError",
            traceback="Traceback\n" + "  more\n" * 30 + f'  line 1, in f\nNameError: "np" at {x}',
        )
        return Outcome(metrics={}, artifacts={}, seconds=0.0, output_tail="", failure=failure)
    metrics = {"combined_score": 1 - abs(100 - x) / 100}
    return Outcome(metrics=metrics, artifacts={}, seconds=0.0, output_tail="")


class BuggyModel:
    """Writes a bug each time, and takes it out when it is asked to mend the program."""

    def __init__(self) -> None:
        self.repairs: list[str] = []
        self.warned: list[str] = []

    def __call__(self, request: TextRequest) -> str:
        user = request.messages[-1].content
        current = user[user.index("# Current Program\n") :]
        if "Avoid a mistake that recurs" in user:
            self.warned.append(user)
        if "FAILED" in user:
            self.repairs.append(user)
            return f"```python\nx = {number_in(current)}\n```"
        return f"```python\nx = {number_in(current) + 1}  # BUG {request.seed}\n```"


async def test_a_failed_program_is_mended_with_its_error(tmp_path: Path) -> None:
    model = BuggyModel()
    config = toy_config(
        max_iterations=40,
        database={},
        prompt={"include_artifacts": False},
        rookery={"in_flight": 1, "workers": 1},
    )
    executor = ToyExecutor(toy_with_bugs)
    report = await evolve_toy(tmp_path, config, model=toy_model(model), executor=executor)
    assert report.best is not None and (report.best.score or 0) > 0.05
    assert model.repairs
    for prompt in model.repairs:
        current = prompt[prompt.index("# Current Program\n") :]
        assert f'NameError: "np" at {number_in(current)}' in prompt, "its own error"
        assert 5 < prompt.count("  more\n") < 15, "the last lines of it, as lines"
        assert "BUG" in current
    assert model.warned and "error NameError" in model.warned[-1]
    rows = {row.name: row for row in report.operators}
    assert report.strategy == "adaptive"
    assert sum(row.num_given for row in report.operators) == report.num_iterations == 40
    assert rows["best"].num_accepted == 0
    assert rows["repair"].num_given == len(model.repairs)
    assert rows["repair"].num_accepted == rows["repair"].num_improved > 3
    assert report.failed_share == pytest.approx(report.num_failed / 40)
    line = [row.id for row in report.winning_line]
    assert line[0] == "first1" and len(line) == rows["repair"].num_improved + 1
    assert all("BUG" not in row.diff.replace("-", "") for row in report.winning_line)


async def test_checkpoints_hold_programs_with_a_score_alone(tmp_path: Path) -> None:
    config = toy_config(max_iterations=20, database={})
    report = await evolve_toy(tmp_path, config, executor=ToyExecutor(toy_with_bugs))
    checkpoint = read_checkpoint(tmp_path / "toy" / "checkpoints" / "checkpoint_20")
    assert len(checkpoint.programs) == report.num_programs
    assert all(program.metrics for program in checkpoint.programs)


async def test_openevolves_strategy_keeps_no_failed_programs(tmp_path: Path) -> None:
    config = toy_config(max_iterations=10)
    model = BuggyModel()
    executor = ToyExecutor(toy_with_bugs)
    report = await evolve_toy(tmp_path, config, model=toy_model(model), executor=executor)
    assert (report.strategy, report.operators) == ("openevolve", ())
    assert not model.repairs and not model.warned
    assert report.failed_share == 1.0
