"""Which checkpoint is chosen, also where some of the select tasks have no reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rookery.loops.grpo.selection import Selection
from rookery.runs import Run
from rookery.tasks.scorers import ExactConfig
from rookery.tasks.splits import SplitsConfig
from rookery.tasks.taskset import Taskset
from rookery.types import Evaluation, ModelRef, Task

UNUSED: Any = None
"""Selection needs the weights for the report alone."""


class Table:
    """An Evaluator: rewards by the version of the model, in the order of the tasks; None failed."""

    def __init__(self, rewards: Mapping[str, Sequence[float | None]]) -> None:
        self._rewards = rewards

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        return [self._evaluate(model, tasks) for model in models]

    def _evaluate(self, model: ModelRef, tasks: Sequence[Task]) -> Evaluation:
        pairs = list(zip(tasks, self._rewards[model.version], strict=True))
        return Evaluation(
            model=model,
            rewards={task.id: reward for task, reward in pairs if reward is not None},
            errors={task.id: "no judge today" for task, reward in pairs if reward is None},
            num_tokens=0,
            seconds=0.0,
        )


def make_taskset(num: int) -> Taskset:
    tasks = [Task(id=f"t/{i}", prompt="p", reference="r", source="t") for i in range(num)]
    splits = SplitsConfig(search=0.0, select=1.0, report=0.0)
    return Taskset(name="t", tasks=tuple(tasks), scorer=ExactConfig(), splits=splits)


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ([(0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 0.0)], 1),
        ([(None, 0.0, 1.0), (None, 1.0, 1.0), (None, 1.0, 0.0)], 1),
        ([(0.0, 0.0, 1.0), (None, 1.0, 1.0), (1.0, 1.0, 0.0)], 1),
        ([(1.0, 1.0, None), (1.0, None, 0.0), (1.0, None, 1.0)], 0),
        ([(0.0, None, None), (None, 1.0, 1.0), (1.0, 1.0, 1.0)], 2),
        ([(None, None, None), (1.0, 1.0, 1.0)], 1),
        ([(1.0, 0.0, 0.0), (None, None, None)], 0),
    ],
)
async def test_checkpoints_are_compared_on_the_tasks_that_both_answered(
    rewards: Sequence[Sequence[float | None]], best: int, tmp_path: Path
) -> None:
    table = Table({str(step): own for step, own in enumerate(rewards)})
    tasksets = [make_taskset(3)]
    with Run.create(tmp_path, kind="grpo", config={}, name="x") as run:
        selection = Selection(table, tasksets=tasksets, weights=UNUSED, run=run)
        for step in range(len(rewards)):
            await selection.measure(step, ModelRef(name="policy", version=str(step)))
        assert selection.best == best
        assert [mean is None for mean in selection.means.values()] == [
            None in own for own in rewards
        ]
        again = Selection(table, tasksets=tasksets, weights=UNUSED, run=run)
        assert (again.best, again.means) == (selection.best, selection.means)
