"""Outcomes from honest and from hostile bytes, and OpenEvolve's tables of failures."""

import json
from pathlib import Path

import pytest

from rookery.sandbox import (
    EvaluationOutcome,
    EvaluatorConfig,
    Failure,
    FailureKind,
    decode_outcome,
    encode_outcome,
)
from rookery.sandbox.outcome import make_outcome

EVALUATOR = EvaluatorConfig(file=Path("folder/evaluator.py"), timeout_s=7.0)


def outcome_of(
    *lines: object, stopped: Failure | None = None, evaluator: EvaluatorConfig = EVALUATOR
) -> EvaluationOutcome:
    data = b"".join(line if isinstance(line, bytes) else _line(line) for line in lines)
    return make_outcome(data, stopped=stopped, evaluator=evaluator, seconds=1.0, output_tail="")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def begin(stage: str) -> dict[str, object]:
    return {"begin": stage}


def measured(stage: str, **metrics: object) -> dict[str, object]:
    return {"stage": stage, "metrics": metrics, "artifacts": {}}


DONE = {"done": True}


def test_the_last_measured_line_counts() -> None:
    outcome = outcome_of(
        begin("stage1"), measured("stage1", a=1), begin("stage2"), measured("stage2", a=2), DONE
    )
    assert outcome.failure is None
    assert outcome.metrics == {"a": 2} and outcome.stage == "stage2"


def test_artifacts_are_text_and_bytes() -> None:
    line = measured("evaluation", s=1.0) | {
        "artifacts": {"a": {"text": "x"}, "b": {"base64": "/w=="}}
    }
    assert outcome_of(begin("evaluation"), line, DONE).artifacts == {"a": "x", "b": b"\xff"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_what_is_not_finite_is_a_failure_and_no_metric(number: str) -> None:
    line = b'{"stage": "stage1", "metrics": {"bad": %b, "good": 1}, "artifacts": {}}\n'
    outcome = outcome_of(begin("stage1"), line % number.encode(), DONE)
    assert outcome.failure is not None and outcome.failure.kind == "not_finite"
    assert "bad" in outcome.failure.reason and outcome.metrics == {"good": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\n",
        b"[" * 100_000,
        b"null\n",
        b"[]\n",
        b'{"done": true}\n',
        b'{"begin": "stage9"}\n',
        b'{"begin": ["stage1"]}\n',
        b'{"stage": "stage1", "metrics": {"s": null}, "artifacts": {}}\n',
        b'{"stage": "stage1", "metrics": [], "artifacts": {}}\n',
        b'{"stage": "stage1", "metrics": {}, "artifacts": {"a": "bare"}}\n',
        b'{"stage": "stage1", "metrics": {}, "artifacts": {"a": {"base64": "?"}}}\n',
        b'{"stage": "stage1", "metrics": {}, "artifacts": {"a": {"base64": "\\u00e9"}}}\n',
        b'{"stage": "stage1", "metrics": {"s": ' + b"9" * 5000 + b"}",
        b'{"failed": "nonsense", "message": "x"}\n',
        b'{"begin": "stage1"}\n' * 8,
    ],
)
def test_hostile_bytes_are_a_bad_result(data: bytes) -> None:
    outcome = outcome_of(data, begin("stage1"), DONE)
    assert outcome.failure is not None and outcome.failure.kind == "bad_result"
    assert len(outcome.failure.reason) < 300


def test_text_can_be_written_as_utf8() -> None:
    line = b'{"stage": "stage1", "metrics": {"\\ud800": "\\ud800"}, '
    line += b'"artifacts": {"a": {"text": "\\udfff"}}}\n'
    outcome = outcome_of(begin("stage1"), line, DONE)
    assert outcome.metrics == {"?": "?"} and outcome.artifacts == {"a": "?"}


def test_what_follows_the_end_is_not_read() -> None:
    outcome = outcome_of(begin("stage1"), measured("stage1", s=1), DONE, b"garbage\xff\n")
    assert outcome.failure is None


def test_no_result_is_a_crash() -> None:
    for lines in ([], [begin("stage1")], [begin("stage1"), measured("stage1", s=1.0)]):
        failure = outcome_of(*lines).failure
        assert failure is not None and failure.kind == "crash"


def test_why_it_was_stopped_wins_over_its_own_result() -> None:
    stopped = Failure(kind="output", reason="too much")
    assert outcome_of(begin("stage1"), measured("stage1", s=1), DONE, stopped=stopped).failure == (
        stopped
    )


def test_an_outcome_travels_as_json() -> None:
    line = measured("stage1", s=1.0, f=True, t="x") | {
        "artifacts": {"a": {"text": "x"}, "b": {"base64": "/w=="}}
    }
    good = outcome_of(begin("stage1"), line, DONE)
    bad = outcome_of(begin("stage1"), line, begin("stage2"), RAISED)
    for outcome in (good, bad):
        assert decode_outcome(encode_outcome(outcome)) == outcome


RAISED = {"failed": "error", "type": "ValueError", "message": "no", "traceback": "Trace"}
CONTEXT = {
    "stderr": "no",
    "traceback": "Trace",
    "error_type": "ValueError",
    "error_message": "no",
    "cascade_config": "True",
    "cascade_thresholds": "[0.5, 0.75, 0.9]",
    "timeout_config": "7.0",
    "evaluation_file": "evaluator.py",
}


@pytest.mark.parametrize("stage", ["stage1", "cascade_setup"])
def test_a_first_stage_that_raises(stage: str) -> None:
    outcome = outcome_of(begin(stage), RAISED)
    assert outcome.failure == Failure(
        kind="error", reason="no", type="ValueError", traceback="Trace"
    )
    assert outcome.metrics == {"stage1_passed": 0.0, "error": 0.0}
    assert outcome.artifacts == CONTEXT | {"failure_stage": stage}


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_a_later_stage_that_raises_keeps_what_was_measured(stage: str) -> None:
    outcome = outcome_of(begin("stage1"), measured("stage1", a=1.0), begin(stage), RAISED)
    assert outcome.metrics == {"a": 1.0, f"{stage}_passed": 0.0}
    assert outcome.artifacts == {
        f"{stage}_stderr": "no",
        f"{stage}_traceback": "Trace",
        "failure_stage": stage,
    }


def test_timeouts_by_stage() -> None:
    late = Failure(kind="timeout", reason="late")
    first = outcome_of(begin("stage1"), stopped=late)
    assert first.metrics == {"stage1_passed": 0.0, "error": 0.0, "timeout": True}
    assert first.artifacts == {"failure_stage": "stage1", "timeout": "True"}
    none = outcome_of(begin("cascade_setup"), stopped=late)
    assert none.metrics == {"stage1_passed": 0.0, "error": 0.0}
    plain = EVALUATOR.model_copy(update={"cascade": False})
    direct = outcome_of(begin("evaluation"), stopped=late, evaluator=plain)
    assert direct.metrics == {"error": 0.0, "timeout": True}
    assert direct.artifacts["timeout_duration"] == "7.0"


def test_without_a_cascade_an_error_has_its_attempt() -> None:
    plain = EVALUATOR.model_copy(update={"cascade": False})
    outcome = outcome_of(begin("evaluation"), RAISED, evaluator=plain)
    assert outcome.metrics == {"error": 0.0}
    assert outcome.artifacts == {
        "stderr": "no",
        "traceback": "Trace",
        "failure_stage": "evaluation",
        "attempt": "1",
    }


@pytest.mark.parametrize("kind", ["memory", "killed", "crash", "output", "processes", "cpu"])
def test_a_failure_never_gets_a_score(kind: FailureKind) -> None:
    outcome = outcome_of(begin("stage1"), stopped=Failure(kind=kind, reason="why"))
    assert outcome.failure is not None and outcome.failure.kind == kind
    assert "combined_score" not in outcome.metrics
