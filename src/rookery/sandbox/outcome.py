"""The outcome of one evaluation, read from bytes that a hostile program may have written.

A failed outcome holds the metrics measured before the failure and OpenEvolve's flags (`error`,
`stage1_passed`, `timeout`) for prompts and checkpoints; the flags are not scores. Kinds of failure:

| kind         | cause                                                                      |
|--------------|----------------------------------------------------------------------------|
| `error`      | the evaluator or the program raised an exception                           |
| `not_a_dict` | the evaluator returned neither a dict nor an EvaluationResult              |
| `not_finite` | a metric is NaN or infinite                                                |
| `bad_result` | the result cannot be parsed                                                |
| `timeout`    | a stage took longer than `timeout_s`                                       |
| `cpu`        | more CPU time than `cpu_s`                                                 |
| `memory`     | more memory than `memory_bytes`                                            |
| `processes`  | more processes than `max_processes`                                        |
| `output`     | more output than `output_bytes`, or a result of more than `result_bytes`   |
| `killed`     | a signal ended the candidate                                               |
| `crash`      | the candidate ended without a result: `os._exit`, an interpreter abort     |
"""

import base64
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from rookery.sandbox.jail import EvaluatorConfig

__all__ = [
    "MAX_LINES",
    "Artifact",
    "EvaluationOutcome",
    "Failure",
    "FailureKind",
    "Metric",
    "ResultLines",
    "decode_outcome",
    "encode_outcome",
    "make_outcome",
    "read_variants",
]

FailureKind = Literal[
    "error",
    "not_a_dict",
    "not_finite",
    "bad_result",
    "timeout",
    "cpu",
    "memory",
    "processes",
    "output",
    "killed",
    "crash",
]
Metric = bool | int | float | str
Artifact = str | bytes
_Value = TypeVar("_Value", bound=Metric)
_STAGES = ("stage1", "stage2", "stage3")
MAX_LINES = 2 * len(_STAGES) + 1
"""Lines of a result: two per stage (begin, measured) and one that says done or failed."""
_FROM_INSIDE: dict[object, FailureKind] = {
    "error": "error",
    "memory": "memory",
    "not_a_dict": "not_a_dict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Reason why an evaluation has no result. `type` and `traceback` describe the exception."""

    kind: FailureKind
    reason: str
    type: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutcome:
    """Result of one evaluation. `failure` is None if and only if the metrics may be used."""

    metrics: Mapping[str, Metric]
    artifacts: Mapping[str, Artifact]
    seconds: float
    output_tail: str
    """End of the printed output, standard output and standard error together."""
    failure: Failure | None = None
    stage: str = ""
    """The last stage that began: `stage1` to `stage3`, `cascade_setup` or `evaluation`."""
    is_forgeable: bool = False
    """Whether the program ran in the evaluator's process, where it can forge its score."""
    unsupported: str = ""
    """First operation of the evaluator that does not work across processes, or ""."""


@dataclass(slots=True)
class ResultLines:
    """State of a result after the lines read so far."""

    stage: str = ""
    metrics: dict[str, Metric] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    failure: Failure | None = None
    is_done: bool = False
    unsupported: str = ""


class _BadLineError(Exception):
    """A result line that the code inside the jail never writes."""


def make_outcome(
    result: bytes,
    *,
    stopped: Failure | None,
    evaluator: EvaluatorConfig,
    seconds: float,
    output_tail: str,
    is_forgeable: bool = False,
) -> EvaluationOutcome:
    """Make the outcome from a result's bytes. `stopped`, why the candidate was stopped or died,
    overrides a failure in the result."""
    report = _read(result)
    failure = stopped or report.failure
    if failure is None and not report.is_done:
        failure = Failure(kind="crash", reason="The program ended without a result.")
    if failure is None:
        failure = _find_not_finite(report.metrics)
    metrics = {name: v for name, v in report.metrics.items() if not _is_not_finite(v)}
    artifacts = dict(report.artifacts)
    if failure is not None and failure.kind != "not_finite":
        flags, notes = _failure_tables(report.stage, failure, evaluator)
        metrics, artifacts = metrics | flags, artifacts | notes
    return EvaluationOutcome(
        metrics=metrics,
        artifacts=artifacts,
        seconds=seconds,
        output_tail=output_tail,
        failure=failure,
        stage=report.stage,
        is_forgeable=is_forgeable,
        unsupported=report.unsupported,
    )


def read_variants(outcome: EvaluationOutcome, *, num: int) -> list[Mapping[str, Metric] | None]:
    """Return the metrics of each of `num` variants, None for a failed one; [] if they failed
    together, or if the result is no list of them: a program may have forged it."""
    variants: list[Mapping[str, Metric] | None] = []
    try:
        results = json.loads(outcome.artifacts.get("variants", ""))
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(results, list) and all(isinstance(lines, list) for lines in results)
    if outcome.failure is not None or not is_list or len(results) != num:
        return []
    for lines in results:
        report = _read(b"\n".join(json.dumps(line).encode() for line in lines))
        is_valid = report.is_done and not report.failure and not _find_not_finite(report.metrics)
        variants.append(report.metrics if is_valid else None)
    return variants


def encode_outcome(outcome: EvaluationOutcome) -> bytes:
    """Encode an outcome as JSON, for a queue or another machine."""
    document = asdict(outcome) | {
        "artifacts": {
            name: {"text": value}
            if isinstance(value, str)
            else {"base64": base64.b64encode(value).decode()}
            for name, value in outcome.artifacts.items()
        }
    }
    return json.dumps(document).encode()


def decode_outcome(data: bytes) -> EvaluationOutcome:
    """Decode the output of `encode_outcome`."""
    document = json.loads(data)
    failure = document.pop("failure")
    artifacts = {name: _decode(value) for name, value in document.pop("artifacts").items()}
    return EvaluationOutcome(
        **document, artifacts=artifacts, failure=Failure(**failure) if failure else None
    )


def _read(result: bytes) -> ResultLines:
    """Read lines up to the first that ends the result; later lines are ignored."""
    report = ResultLines()
    try:
        for number, line in enumerate(io.BytesIO(result)):
            if number == MAX_LINES:
                raise _BadLineError(f"more than {MAX_LINES} lines")
            _follow(report, json.loads(line))
            if report.is_done or report.failure is not None:
                break
    except (ValueError, RecursionError, _BadLineError) as error:
        reason = f"The result cannot be read: {' '.join(str(error).split())[:200]}"
        report.failure = Failure(kind="bad_result", reason=reason)
    return report


def _follow(report: ResultLines, line: Any) -> None:
    if isinstance(line, dict):
        report.unsupported = _clean(str(line.get("unsupported", "")))
    match line:
        case {"begin": ("stage1" | "stage2" | "stage3" | "cascade_setup" | "evaluation") as stage}:
            report.stage = stage
        case {"stage": str(), "metrics": dict() as metrics, "artifacts": dict() as artifacts}:
            if not all(isinstance(value, Metric) for value in metrics.values()):
                raise _BadLineError("a metric is neither a number nor text")
            report.metrics = {_clean(name): _clean(value) for name, value in metrics.items()}
            report.artifacts = {_clean(name): _decode(value) for name, value in artifacts.items()}
        case {"done": True} if report.stage:
            report.is_done = True
        case {"failed": str() as kind, "message": str() as message} if kind in _FROM_INSIDE:
            report.failure = Failure(
                kind=_FROM_INSIDE[kind],
                reason=_clean(message),
                type=_clean(str(line.get("type", ""))),
                traceback=_clean(str(line.get("traceback", ""))),
            )
        case _:
            raise _BadLineError("an unknown line")


def _clean(value: _Value) -> _Value:
    """Make text encodable as UTF-8: JSON lets lone surrogates through."""
    if isinstance(value, str):
        return type(value)(value.encode(errors="replace").decode())
    return value


def _decode(value: Any) -> Artifact:
    match value:
        case {"text": str() as text}:
            return _clean(text)
        case {"base64": str() as text}:
            try:
                return base64.b64decode(text, validate=True)
            except ValueError as error:  # non-ASCII text raises this, not binascii.Error
                raise _BadLineError(str(error)) from error
    raise _BadLineError("an artifact is neither text nor bytes")


def _is_not_finite(value: Metric) -> bool:
    if isinstance(value, str):
        return False
    try:
        return not math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return True


def _find_not_finite(metrics: Mapping[str, Metric]) -> Failure | None:
    names = sorted(name for name, value in metrics.items() if _is_not_finite(value))
    if not names:
        return None
    return Failure(kind="not_finite", reason=f"Not a finite number: {', '.join(names)[:500]}.")


def _failure_tables(
    stage: str, failure: Failure, evaluator: EvaluatorConfig
) -> tuple[dict[str, Metric], dict[str, Artifact]]:
    """Return the metrics and artifacts of OpenEvolve 0.4 for a failure, without its time stamp:
    artifacts enter prompts, which must not depend on the clock."""
    stage = stage or ("cascade_setup" if evaluator.cascade else "evaluation")
    is_timeout = failure.kind == "timeout"
    if stage in _STAGES[1:]:
        flags: dict[str, Metric] = {f"{stage}_passed": 0.0}
        notes: dict[str, Artifact] = {"failure_stage": stage}
        if is_timeout:
            return flags | {"timeout": True}, notes | {f"{stage}_timeout": "True"}
        return flags, notes | {
            f"{stage}_stderr": failure.reason,
            f"{stage}_traceback": failure.traceback,
        }
    if stage == "evaluation":
        if is_timeout:
            return {"error": 0.0, "timeout": True}, {
                "timeout": "True",
                "timeout_duration": str(evaluator.timeout_s),
                "failure_stage": "evaluation",
                "error_type": "timeout",
            }
        return {"error": 0.0}, {
            "stderr": failure.reason,
            "traceback": failure.traceback,
            "failure_stage": "evaluation",
            "attempt": "1",
        }
    if stage == "stage1" and is_timeout:
        return (
            {"stage1_passed": 0.0, "error": 0.0, "timeout": True},
            {"failure_stage": "stage1", "timeout": "True"},
        )
    return {"stage1_passed": 0.0, "error": 0.0}, {
        "stderr": failure.reason,
        "traceback": failure.traceback,
        "failure_stage": stage,
        "error_type": failure.type or failure.kind,
        "error_message": failure.reason,
        "cascade_config": str(evaluator.cascade),
        "cascade_thresholds": str(list(evaluator.thresholds)),
        "timeout_config": str(evaluator.timeout_s),
        "evaluation_file": evaluator.file.name,
    }
