"""What a benchmark says of a finished run: who misses a task has no mean there either."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rookery.errors import TaskError
from rookery.loops.genome import GenomeConfig
from rookery.types import Task

FILE = Path(__file__).parents[2] / "benchmarks" / "search_causes.py"


@pytest.fixture(scope="module")
def causes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_causes", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_candidate_that_misses_a_task_has_no_mean(causes: ModuleType) -> None:
    tasks = [
        Task(id=f"{source}{place}", prompt="?", reference="x", source=source)
        for source, count in (("a", 2), ("b", 1))
        for place in range(count)
    ]
    rewards = {"a0": 1.0, "a1": 0.0, "b0": 1.0}
    weights = {"a": 1.0, "b": 3.0, "unreported": 1.0}
    assert causes.weighted_mean(rewards, tasks, weights=weights) == 0.875
    for missing in rewards:
        others = {task: reward for task, reward in rewards.items() if task != missing}
        assert causes.weighted_mean(others, tasks, weights=weights) is None


def candidate(merit: float, *parents: str, num_tasks: int = 4) -> dict[str, Any]:
    return {"merit": merit, "score": merit, "violation": 0.0, "num_tasks": num_tasks,
            "parents": parents, "operator": "sum" if parents else "founder",
            "version": f"{merit}"}  # fmt: skip


CANDIDATES = {
    "f0": candidate(0.5),
    "f1": candidate(0.6),
    "c0": candidate(0.7, "f0", "f1"),
    "c1": candidate(0.9, "f0"),
    "c2": candidate(0.2, "f0", num_tasks=2),
}
CONFIG = GenomeConfig.model_validate(
    {"init": {"type": "zero"}, "tasksets": [{"type": "generated", "generator": "label-kind"}]}
)


def test_who_has_no_mean_is_counted_and_left_out(causes: ModuleType) -> None:
    means = {"f0": 0.5, "f1": None, "c0": 0.6, "c1": 0.8}
    found = causes.summarise(CANDIDATES, means, winner="c0", config=CONFIG)
    assert (found["num_complete"], found["num_failed"], found["oracle"]) == (4, 1, 0.8)
    assert found["dropped"] == 2 / 18, "who failed on the report tasks was not dropped"
    assert found["operators"]["sum"]["report"] == pytest.approx(0.3), "c1 over f0, and no other"
    unknown = causes.gains_of(CANDIDATES, {"f0": 0.5, "c0": 0.6})
    assert math.isnan(unknown["sum"]["report"]), "its best parent may be the other one"
    with pytest.raises(TaskError, match="winner f1 failed on a report task"):
        causes.summarise(CANDIDATES, means, winner="f1", config=CONFIG)
