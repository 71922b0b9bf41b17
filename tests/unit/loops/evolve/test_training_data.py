"""What a run teaches: the answers that improved a program, and models that join later."""

import json
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import (
    ToyExecutor,
    evolve_toy,
    number_in,
    propose,
    propose_new,
    toy_config,
    toy_model,
)

from rookery.loops.evolve.report import export_training_data
from rookery.ports import TextModel
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.tasks.taskset import load_taskset_file
from rookery.testing import FakeTextModel


def exported(folder: Path) -> list[dict[str, Any]]:
    with Run.view(folder / "toy") as view:
        text = export_training_data(view, features=toy_config().database.feature_dimensions)
    return [json.loads(line) for line in text.splitlines()]


async def test_rows_are_the_answers_that_improved_their_parent(tmp_path: Path) -> None:
    model = toy_model()
    await evolve_toy(tmp_path, toy_config(max_iterations=40), model=model)
    rows = exported(tmp_path)
    assert 0 < len(rows) < 40
    said = {(*(m.content for m in r.messages), propose(r)) for r in model.requests}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        texts = tuple(message["content"] for message in row["messages"])
        assert texts in said
        assert row["score"] == 1 - abs(100 - number_in(texts[-1])) / 100 > row["parent_score"]
        assert row["model"] == "toy"


async def test_supervised_training_reads_the_rows(tmp_path: Path) -> None:
    await evolve_toy(tmp_path, toy_config(max_iterations=40))
    file, rows = tmp_path / "wins.jsonl", exported(tmp_path)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_taskset_file(str(file)).split("all")
    assert len(tasks) == len(rows)
    assert {task.reference for task in tasks} == {row["messages"][-1]["content"] for row in rows}
    for task in tasks:
        assert not isinstance(task.prompt, str)
        assert [message.role for message in task.prompt] == ["system", "user"]


async def test_a_run_that_improved_nothing_teaches_nothing(tmp_path: Path) -> None:
    worse = toy_model(lambda request: f"```python\nx = -{1 + (request.seed or 0)}\n```")
    await evolve_toy(tmp_path, toy_config(max_iterations=5), model=worse)
    assert exported(tmp_path) == []


async def evolve_with(
    folder: Path, models: dict[str, TextModel], *, num_iterations: int
) -> EvolveReport:
    config = toy_config(max_iterations=num_iterations, rookery={"bandit": True})
    return await evolve_toy(
        folder,
        config,
        models=models,
        executor=ToyExecutor(),
    )


async def test_models_join_and_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    def models(*names: str) -> dict[str, TextModel]:
        return {name: FakeTextModel(propose_new, name=name) for name in names}

    await evolve_with(tmp_path, models("base"), num_iterations=20)
    result = await evolve_with(tmp_path, models("base", "tuned"), num_iterations=50)
    plays = {arm.name: arm.num_plays for arm in result.models}
    # How often depends on the order in which answers come.
    assert plays["base"] + plays["tuned"] == 50 and plays["tuned"] >= 1
    result = await evolve_with(tmp_path, models("other"), num_iterations=60)
    after = {arm.name: (arm.weight, arm.num_plays) for arm in result.models}
    assert after == {
        "other": (1.0, 10),
        "base": (0.0, plays["base"]),
        "tuned": (0.0, plays["tuned"]),
    }


async def test_an_attempt_of_a_model_that_left_is_put_to_another(tmp_path: Path) -> None:
    class Broken:
        async def reply(self, request: object) -> Any:
            raise KeyError("The session ends here.")

    with pytest.raises(KeyError):
        await evolve_with(tmp_path, {"gone": Broken()}, num_iterations=6)
    other = FakeTextModel(propose_new, name="other")
    result = await evolve_with(tmp_path, {"other": other}, num_iterations=6)
    assert result.num_iterations == 6 and len(other.requests) == 6
