"""The evolve loop on a toy: it improves, writes its files, counts failures, obeys its limits."""

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import (
    ToyExecutor,
    evolve_toy,
    number_in,
    read_best,
    toy_config,
    toy_model,
)

from rookery.compat import openevolve
from rookery.compat.openevolve import fill_best, read_checkpoint, read_config
from rookery.loops.evolve import outputs
from rookery.loops.evolve.outputs import log_to_file
from rookery.loops.evolve.search_state import search_config
from rookery.sandbox import EvaluationOutcome, Failure
from rookery.types import TextRequest


async def test_it_improves_and_leaves_its_files(tmp_path: Path) -> None:
    config = toy_config(max_iterations=60, evolution_trace={"enabled": True})
    report = await evolve_toy(tmp_path, config)
    assert report.first is not None and report.best is not None
    assert report.first.score == pytest.approx(0.01)
    assert (report.best.score or 0) > 0.05
    assert report.num_iterations == 60
    assert report.num_committed + report.num_failed == 60
    assert report.winning_line[0].id == "first1"
    assert report.winning_line[-1].id == report.best.id
    assert "+x = " in report.winning_line[-1].diff
    assert sum(report.staleness.values()) == 60
    scores = [point.best for point in report.curve if point.best is not None]
    assert (
        len(scores) == len(report.curve)
        and scores == sorted(scores)
        and scores[-1] == report.best.score
    )
    folder = tmp_path / "toy"
    assert read_best(tmp_path)["id"] == report.best.id
    assert (folder / "best" / "best_program.py").read_text() == report.best.code
    checkpoint = read_checkpoint(folder / "checkpoints" / "checkpoint_60")
    assert checkpoint.best_id == report.best.id
    assert len(checkpoint.programs) == report.num_programs
    assert json.loads((folder / "report.json").read_text())["kind"] == "evolve"
    lines = (folder / "evolution_trace.jsonl").read_text().splitlines()
    assert len(lines) == report.num_committed
    assert all(json.loads(line)["llm_response"] for line in lines)


async def test_a_best_found_while_an_earlier_one_is_written_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closing, num = threading.Event(), 0
    close = outputs.Outputs.close

    def fill_slowly(*args: Any, **options: Any) -> None:
        nonlocal num
        num += 1
        if num == 2:  # the first program's was the first
            assert is_closing.wait(timeout=60)
        fill_best(*args, **options)

    async def close_and_tell(self: outputs.Outputs) -> None:
        await close(self)
        is_closing.set()

    monkeypatch.setattr(openevolve, "fill_best", fill_slowly)
    monkeypatch.setattr(outputs.Outputs, "close", close_and_tell)
    result = await evolve_toy(tmp_path, toy_config())
    assert num == 3
    assert result.best is not None and read_best(tmp_path)["id"] == result.best.id


async def test_checkpoints_keep_prompts_and_large_artifacts(tmp_path: Path) -> None:
    config = toy_config(
        max_iterations=10, database={"num_islands": 1, "artifact_size_threshold": 5}
    )
    await evolve_toy(tmp_path, config)
    folder = tmp_path / "toy" / "checkpoints" / "checkpoint_10"
    checkpoint = read_checkpoint(folder)
    children = [program for program in checkpoint.programs if program.parent_id]
    assert children
    for program in checkpoint.programs:
        assert str(program.artifacts["note"]).startswith("x was")
        assert (folder / "artifacts" / program.id / "note").is_file()
        assert bool(program.prompts) == bool(program.parent_id)
    small = toy_config(max_iterations=10, database={"num_islands": 1})
    await evolve_toy(tmp_path / "small", small)
    folder = tmp_path / "small" / "toy" / "checkpoints" / "checkpoint_10"
    for program in read_checkpoint(folder).programs:
        assert str(program.artifacts["note"]).startswith("x was")
        if program.parent_id:
            assert "x = " in program.prompts["full_rewrite_user"]["responses"][0]
    assert not (folder / "artifacts").exists()


def test_the_log_cannot_move_the_terminal(tmp_path: Path) -> None:
    with log_to_file(toy_config(), tmp_path) as file:
        logging.getLogger("rookery.hostile").warning(
            "%s", "a\x1b[2J\x1b[1;31mb\x07\x1b]0;title\tc\nd"
        )
    assert file.read_text().endswith("ab]0;title\tc\nd\n")


async def test_checkpoints_share_programs_with_each_other_and_not_with_the_run(
    tmp_path: Path,
) -> None:
    """Also those of a run that went on."""
    await evolve_toy(tmp_path, toy_config(max_iterations=10))
    await evolve_toy(tmp_path, toy_config(max_iterations=20))
    checkpoints = tmp_path / "toy" / "checkpoints"
    before, after = (checkpoints / f"checkpoint_{number}" / "programs" for number in (10, 20))
    both = {path.name for path in before.iterdir()} & {path.name for path in after.iterdir()}
    assert both
    assert all((before / name).samefile(after / name) for name in both)
    blobs = [path for path in (tmp_path / "toy" / "blobs").rglob("*") if path.is_file()]
    assert blobs and all(path.stat().st_nlink == 1 for path in blobs)


async def test_a_large_population_gets_a_checkpoint_when_enough_of_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "NEW_SHARE", 0.2)
    config = toy_config(max_iterations=30, checkpoint_interval=1)
    await evolve_toy(tmp_path, config)
    folders = (tmp_path / "toy" / "checkpoints").iterdir()
    numbers = sorted(int(folder.name.removeprefix("checkpoint_")) for folder in folders)
    assert numbers[:4] == [1, 2, 3, 4]
    assert numbers[-1] == 30
    gaps = {after - before for before, after in pairwise(numbers)}
    assert gaps >= {1, 2}, "one interval while it is small, more when it is large"


# The adaptive strategy in the whole loop.


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


def toy_with_bugs(code: str) -> EvaluationOutcome:
    """As an evaluator that a program with a bug does not get through."""
    x = number_in(code)
    if "BUG" in code:
        failure = Failure(
            kind="error",
            reason="name 'np' is not defined",
            type="NameError",
            traceback="Traceback\n" + "  more\n" * 30 + f'  line 1, in f\nNameError: "np" at {x}',
        )
        return EvaluationOutcome(
            metrics={}, artifacts={}, seconds=0.0, output_tail="", failure=failure
        )
    metrics = {"combined_score": 1 - abs(100 - x) / 100}
    return EvaluationOutcome(metrics=metrics, artifacts={}, seconds=0.0, output_tail="")


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
