"""The Countdown tasks of `benchmarks/es_countdown.py` and their checker."""

import importlib.util
import json
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from rookery.types import Completion, ModelRef, Task

FILE = Path(__file__).parents[2] / "benchmarks" / "es_countdown.py"
TASK = Task(
    id="t", source="c", prompt="", reference=json.dumps({"numbers": [3, 5, 2], "target": 16})
)


@pytest.fixture(scope="module")
def countdown() -> ModuleType:
    spec = importlib.util.spec_from_file_location("es_countdown", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "accuracy", "reward"),
    [
        ("<answer>(3 + 5) * 2</answer>", 1.0, 1.0),
        ("<answer>1</answer> no: <answer>\n2*(5+3)\n</answer>", 1.0, 1.0),
        ("<answer>3 + 5 * 2</answer>", 0.0, 0.1),
        ("<answer>3 + 5 + 2 + 0</answer>", 0.0, 0.0),
        ("<answer>(3 + 5) * 2 = 16</answer>", 0.0, 0.0),
        ("<answer>3 / (5 - 5)</answer>", 0.0, 0.0),
        ("<answer>2 ** 3 ** 5</answer>", 0.0, 0.0),
        ("<answer>__import__('os')</answer>", 0.0, 0.0),
        ("<answer>" + "(" * 5000 + "</answer>", 0.0, 0.0),
        ("16", 0.0, 0.0),
    ],
)
async def test_answers_are_computed_exactly(
    countdown: ModuleType, text: str, accuracy: float, reward: float
) -> None:
    completion = Completion(
        model=ModelRef(name="m", version="1"),
        tokens=(),
        logprobs=(),
        text=text,
        finish_reason="stop",
    )
    assert await countdown.exact(TASK, completion) == accuracy
    assert await countdown.shaped(TASK, completion) == reward


def test_tasks_differ_have_three_or_four_numbers_and_are_the_same_every_time(
    countdown: ModuleType,
) -> None:
    rows = list(countdown.make_rows(200, seed=1))
    asked = [json.loads(row["answer"]) for row in rows]
    assert [len(task["numbers"]) for task in asked[:4]] == [3, 4, 3, 4]
    assert len({(*sorted(task["numbers"]), task["target"]) for task in asked}) == 200
    assert all(10 <= task["target"] < 100 for task in asked)
    assert rows[:9] == list(islice(countdown.make_rows(50, seed=1), 9))
    assert countdown.value_of("1 / 3 * 3")[0] == 1
