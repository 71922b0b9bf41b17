"""Calls an evaluator as OpenEvolve does and reports each stage as one JSON line.

    {"begin": "stage1"}
    {"stage": "stage1", "metrics": {"combined_score": 0.7}, "artifacts": {"log": {"text": "ok"}}}
    {"done": true, "unsupported": ""}

A failure is one last line: {"failed": "error", "type": ..., "message": ..., "traceback": ...}.
Each stage line holds the merged metrics and artifacts of all stages so far.
"""

import asyncio
import base64
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "Emit",
    "EvaluationResult",
    "UnusableEvaluator",
    "evaluate",
    "evaluate_variants",
    "load_evaluator",
    "provide_openevolve",
]


Emit = Callable[[dict[str, Any]], None]
MAX_TRACEBACK_CHARS = 20_000
"""Longer tracebacks keep only their end, which names the error."""


class UnusableEvaluator(Exception):
    """The evaluator's file cannot be imported, or has no `evaluate`."""


class _NotADict(Exception):
    """The evaluator returned neither a dict nor an EvaluationResult."""


def load_evaluator(path: Path) -> ModuleType:
    """Import the evaluator's file as `evaluation_module`, with its folder first on `sys.path`."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("evaluation_module", path)
    if spec is None or spec.loader is None:
        raise UnusableEvaluator(f"{path.name} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluation_module"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        text = _traceback(error)
        raise UnusableEvaluator(f"importing {path.name} failed:\n{text}") from error
    if not callable(vars(module).get("evaluate")):
        raise UnusableEvaluator(f"{path.name} has no function `evaluate(program_path)`.")
    return module


def evaluate(
    module: ModuleType,
    program: str,
    *,
    is_cascade: bool,
    thresholds: list[float],
    emit: Emit,
    note: Callable[[], str] = lambda: "",
) -> None:
    """Run the stages (or plain `evaluate`) on the program and emit their results. At the end `note`
    names an operation that is impossible on a program in another process, or ""."""
    functions = vars(module)
    try:
        if is_cascade and "evaluate_stage1" in functions:
            _cascade(functions, program, thresholds, emit)
        else:
            stage = "cascade_setup" if is_cascade else "evaluation"
            emit({"begin": stage})
            metrics, artifacts = _call(functions["evaluate"], program)
            _emit_measured(stage, metrics, artifacts, emit)
        emit({"done": True, "unsupported": note()})
    except BaseException as error:  # noqa: BLE001 (the candidate's own code, `sys.exit` included)
        emit(_describe(error) | {"unsupported": note()})


def evaluate_variants(run: Callable[[int, Emit], None], count: int, *, emit: Emit) -> None:
    """Run each variant and emit all their lines, without artifacts, as one artifact."""
    emit({"begin": "evaluation"})
    results = []
    for number in range(count):
        lines: list[dict[str, Any]] = []
        run(number, lines.append)
        results.append(
            [line | {"artifacts": {}} if "artifacts" in line else line for line in lines]
        )
    _emit_measured("evaluation", {}, {"variants": results}, emit)
    emit({"done": True, "unsupported": ""})


def _cascade(functions: dict[str, Any], program: str, thresholds: list[float], emit: Emit) -> None:
    metrics: dict[str, Any] = {}
    artifacts: dict[str, Any] = {}
    for number in (1, 2, 3):
        function = functions.get(f"evaluate_stage{number}")
        if function is None:
            return
        stage = f"stage{number}"
        emit({"begin": stage})
        stage_metrics, more = _call(function, program)
        metrics = stage_metrics if number == 1 else _numeric(metrics) | _numeric(stage_metrics)
        artifacts |= more
        _emit_measured(stage, metrics, artifacts, emit)
        if number > len(thresholds) or not _passes(metrics, thresholds[number - 1]):
            return


def _call(function: Any, program: str) -> tuple[dict[str, Any], dict[str, Any]]:
    result = function(program)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    if isinstance(result, dict):
        return {str(name): _plain(value) for name, value in result.items()}, {}
    # An EvaluationResult of OpenEvolve, of the shim, or of a class that looks the same.
    metrics, artifacts = getattr(result, "metrics", None), getattr(result, "artifacts", None)
    if not isinstance(metrics, dict):
        raise _NotADict(
            f"the evaluator returned {type(result).__name__}; it must return a dict of metrics or "
            "an EvaluationResult."
        )
    more = {str(name): value for name, value in (artifacts or {}).items()}
    return {str(name): _plain(value) for name, value in metrics.items()}, more


async def _wait(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # it holds more than one number
        return value


def _numeric(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "error"
    }


def _passes(metrics: dict[str, Any], threshold: float) -> bool:
    """True if `combined_score`, else the mean of all numbers but `error`, reaches the threshold."""
    score = metrics.get("combined_score")
    if isinstance(score, int | float):
        return score >= threshold
    numbers = list(_numeric(metrics).values())
    return bool(numbers) and sum(numbers) / len(numbers) >= threshold


def _emit_measured(
    stage: str, metrics: dict[str, Any], artifacts: dict[str, Any], emit: Emit
) -> None:
    scalars = {n: v for n, v in metrics.items() if isinstance(v, bool | int | float | str)}
    others = {n: v for n, v in metrics.items() if n not in scalars}
    encoded = {name: _encode(value) for name, value in (others | artifacts).items()}
    emit({"stage": stage, "metrics": scalars, "artifacts": encoded})


def _encode(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, str):
        return {"text": value}
    try:
        return {"text": json.dumps(value)}
    except (TypeError, ValueError, RecursionError):
        return {"text": str(value)}


def _describe(error: BaseException) -> dict[str, Any]:
    kind = "error"
    if isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, _NotADict):
        kind = "not_a_dict"
    name = type(error).__name__
    record = {"failed": kind, "type": name.lstrip("_"), "message": str(error) or name}
    return record | {"traceback": _traceback(error)}


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]


@dataclass
class EvaluationResult:
    """Stand-in for OpenEvolve's class of this name: metrics and artifacts."""

    metrics: dict[str, float]
    artifacts: dict[str, str | bytes] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, metrics: dict[str, float]) -> "EvaluationResult":
        return cls(metrics=metrics)

    def to_dict(self) -> dict[str, float]:
        return self.metrics

    def has_artifacts(self) -> bool:
        return bool(self.artifacts)

    def get_artifact_keys(self) -> list[str]:
        return list(self.artifacts)

    def get_artifact_size(self, key: str) -> int:
        value = self.artifacts.get(key, b"")
        return len(value if isinstance(value, bytes) else str(value).encode())

    def get_total_artifact_size(self) -> int:
        return sum(self.get_artifact_size(key) for key in self.artifacts)


def provide_openevolve() -> None:
    """Make `openevolve.evaluation_result` importable; an installed OpenEvolve takes precedence."""
    if importlib.util.find_spec("openevolve") is not None:
        return
    package, module = ModuleType("openevolve"), ModuleType("openevolve.evaluation_result")
    package.__path__ = []
    for each in (package, module):
        vars(each)["EvaluationResult"] = EvaluationResult
    vars(package)["evaluation_result"] = module
    sys.modules |= {"openevolve": package, "openevolve.evaluation_result": module}
