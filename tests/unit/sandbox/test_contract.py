"""The evaluator's contract as the code inside the jail keeps it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.sandbox.inside.contract import (
    UnusableEvaluator,
    evaluate,
    load_evaluator,
    provide_openevolve,
)


@pytest.fixture(autouse=True)
def keep_modules() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.startswith(("evaluation_module", "openevolve")):
            del sys.modules[name]


def lines_of(folder: Path, text: str, **settings: Any) -> list[dict[str, Any]]:
    file = folder / "evaluator.py"
    file.write_text(text)
    lines: list[dict[str, Any]] = []
    options: dict[str, Any] = {"is_cascade": True, "thresholds": [0.5, 0.75]} | settings
    module = load_evaluator(file)
    evaluate(module, "p.py", emit=lambda r: lines.append(json.loads(json.dumps(r))), **options)
    return lines


STAGES = """
def evaluate_stage1(path): return {"combined_score": ONE, "error": 0.0, "name": "x", "flag": True}
def evaluate_stage2(path): return {"combined_score": TWO, "speed": 3}
def evaluate_stage3(path): return {"last": 1}
def evaluate(path): return {"not": "called"}
"""


@pytest.mark.parametrize(
    ("one", "two", "stages", "metrics"),
    [
        (0.4, 0.9, 1, {"combined_score": 0.4, "error": 0.0, "name": "x", "flag": True}),
        (0.5, 0.7, 2, {"combined_score": 0.7, "flag": 1.0, "speed": 3.0}),
        (0.5, 0.75, 3, {"combined_score": 0.75, "flag": 1.0, "speed": 3.0, "last": 1.0}),
    ],
)
def test_thresholds_decide_the_stages(
    tmp_path: Path, one: float, two: float, stages: int, metrics: dict[str, object]
) -> None:
    text = STAGES.replace("ONE", str(one)).replace("TWO", str(two))
    lines = lines_of(tmp_path, text)
    begun = [line["begin"] for line in lines if "begin" in line]
    assert begun == ["stage1", "stage2", "stage3"][:stages]
    assert lines[-2]["metrics"] == metrics and lines[-1]["done"]


def test_without_a_combined_score_the_mean_decides(tmp_path: Path) -> None:
    text = """
def evaluate_stage1(path): return {"a": 0.2, "b": 0.9, "error": 5.0}
def evaluate_stage2(path): return {"c": 1.0}
def evaluate(path): pass
"""
    assert [line.get("begin") for line in lines_of(tmp_path, text)][2] == "stage2"
    low = lines_of(tmp_path, text.replace("0.2", "0.0"))
    assert [line["begin"] for line in low if "begin" in line] == ["stage1"]


def test_plain_evaluate_and_its_names(tmp_path: Path) -> None:
    text = "def evaluate(path): return {'s': 1.0, 'given': path}"
    assert lines_of(tmp_path, text)[0] == {"begin": "cascade_setup"}
    lines = lines_of(tmp_path, text, is_cascade=False)
    assert lines[0] == {"begin": "evaluation"}
    assert lines[1]["metrics"] == {"s": 1.0, "given": "p.py"}


def test_coroutines_are_awaited_and_artifacts_kept(tmp_path: Path) -> None:
    provide_openevolve()
    text = """
import asyncio
from openevolve.evaluation_result import EvaluationResult
async def evaluate(path):
    await asyncio.sleep(0)
    return EvaluationResult({"s": 1, "list": [1, 2]}, {"t": "x", "b": b"\\xff", "n": {"k": 1}})
"""
    line = lines_of(tmp_path, text)[1]
    assert line["metrics"] == {"s": 1}
    assert line["artifacts"] == {
        "list": {"text": "[1, 2]"},
        "t": {"text": "x"},
        "b": {"base64": "/w=="},
        "n": {"text": '{"k": 1}'},
    }


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        ("return 1.0", "not_a_dict", "NotADict"),
        ("return None", "not_a_dict", "NotADict"),
        ("raise SystemExit(3)", "error", "SystemExit"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("raise MemoryError", "memory", "MemoryError"),
        ("return 1 / 0", "error", "ZeroDivisionError"),
    ],
)
def test_failures_are_told_apart(tmp_path: Path, body: str, kind: str, name: str) -> None:
    last = lines_of(tmp_path, f"def evaluate(path): {body}")[-1]
    assert (last["failed"], last["type"]) == (kind, name)
    assert last["message"] and name in last["traceback"]


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    text = """
import numpy as np
import torch
def evaluate(path):
    return {"a": np.float32(0.5), "b": np.array([2]), "c": np.zeros(2),
            "d": torch.tensor(0.5), "e": torch.tensor([2]), "f": torch.zeros(2)}
"""
    line = lines_of(tmp_path, text)[1]
    assert line["metrics"] == {"a": 0.5, "b": 2, "d": 0.5, "e": 2}
    assert {"c", "f"} <= set(line["artifacts"])


def test_the_evaluators_folder_is_importable(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_evaluator.py").write_text("value = 3")
    text = """
import neighbour_of_evaluator, sys
def evaluate(path):
    return {"v": neighbour_of_evaluator.value, "n": __name__, "in": __name__ in sys.modules}
"""
    metrics = lines_of(tmp_path, text)[1]["metrics"]
    assert metrics == {"v": 3, "n": "evaluation_module", "in": True}


@pytest.mark.parametrize(
    ("text", "sentence"), [("x = 1", "no function"), ("1 / 0", "ZeroDivisionError")]
)
def test_an_unusable_evaluator_says_why(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UnusableEvaluator, match=sentence):
        lines_of(tmp_path, text)
