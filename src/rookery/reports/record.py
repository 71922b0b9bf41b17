"""The parts of every report: frozen records whose missing numbers stay missing.

An interrupted run has fewer keys, so every field has an empty default. Unknown keys are ignored: an
older page can show a newer report.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rookery.errors import RunError
from rookery.types import Json, Task

__all__ = [
    "AnswerRecord",
    "Estimate",
    "EvaluationReport",
    "Measured",
    "ModelRow",
    "PipelineReport",
    "PipelineStep",
    "QueueStatus",
    "Record",
    "Report",
    "SampledRecord",
    "ServiceStatus",
    "SftReport",
    "SpentRecord",
    "TaskRecord",
    "TenantStatus",
    "Text",
    "describe_task",
    "parse_evaluation_report",
    "parse_pipeline_report",
    "parse_record",
    "parse_sft_report",
]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encodable(value: object) -> object:
    """Replace lone surrogates, which JSON allows and UTF-8 does not."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""A number or None. NaN and infinities become None, because no chart can place them."""
Text = Annotated[str, BeforeValidator(_encodable)]


class Record(BaseModel):
    """Base of all records: frozen; null is the same as a missing key."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            return {key: value for key, value in document.items() if value is not None}
        return document


class Report(Record):
    """Base of all reports; notebooks show them as HTML."""

    render: ClassVar[Callable[["Report"], str] | None] = None
    """Makes the HTML; `rookery.ui.summary` sets it."""
    warnings: tuple[Text, ...] = ()

    def _repr_html_(self) -> str | None:
        return Report.render(self) if Report.render is not None else None


class Estimate(Record):
    """A mean and its 95 % interval."""

    mean: Measured = None
    low: Measured = None
    high: Measured = None


class SpentRecord(Record):
    """Answer tokens that it took to find the result, without those of the report."""

    drawn_tokens: int = 0
    """Tokens of answers, drawn or chosen."""
    trained_tokens: int = 0
    """Answer tokens trained on, counted each time."""

    @property
    def tokens(self) -> int:
        return self.drawn_tokens + self.trained_tokens


class SampledRecord(Record):
    """Several answers to each report task, drawn at random."""

    num: int = 0
    """Answers to each task."""
    pass_at: dict[int, Estimate] = Field(default_factory=dict)
    """k -> mean best reward of k answers. For rewards of 0 and 1 it is the unbiased pass@k."""
    majority: Estimate = Estimate()
    """Reward of the most frequent answer."""
    num_failed: int = 0
    """Tasks with a failed answer; above 0 there are no means."""


class AnswerRecord(Record):
    """One answer to read."""

    name: Text = ""
    """Name of the answering model."""
    text: Text = ""
    reward: Measured = None
    error: Text = ""


class TaskRecord(Record):
    """One task with answers to it."""

    task: Text = ""
    """Id of the task."""
    prompt: Text = ""
    reference: Text = ""
    answers: tuple[AnswerRecord, ...] = ()


def describe_task(task: Task) -> dict[str, str]:
    """Prompt and reference of a task as readable texts."""
    prompt = task.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message.role}: {message.content}" for message in prompt)
    reference = task.reference
    if reference is None:
        reference = ""
    elif not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False)
    return {"prompt": prompt, "reference": reference}


AnyRecord = TypeVar("AnyRecord", bound=Record)


def parse_record(report: type[AnyRecord], document: Mapping[str, Json], *, kind: str) -> AnyRecord:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    try:
        return report.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise RunError(
            f"The report cannot be shown: {where} is {first['input']!r:.80}, and "
            f"{first['msg'].lower()}. Give the report.json of {kind} run as it was written."
        ) from None


# The report of an evaluation: `report.json` of an eval run.


class ModelRow(Estimate):
    """Mean reward of one model, and its gain over the base model."""

    name: Text = ""
    version: Text = ""
    num_scored: int = 0
    num_failed: int = 0
    first_error: Text = ""
    gain: Estimate | None = None
    """Gain over the base model, paired by task; None for the base model."""
    sampled: SampledRecord | None = None
    """Set if `report.samples` is."""


class EvaluationReport(Report):
    """A model and its adapters on one taskset."""

    kind: Literal["eval"] = "eval"
    run: Text = ""
    model: Text = ""
    taskset: Text = ""
    num_tasks: int = 0
    num_questions: int = 0
    """Independent questions among the tasks; 0 if not recorded."""
    num_skipped_rows: int = 0
    models: tuple[ModelRow, ...] = ()
    tasks: tuple[TaskRecord, ...] = ()
    """The first tasks with the answers of all models; the run's events have all."""
    seconds: Measured = None
    tokens: dict[Text, int] = Field(default_factory=dict)
    """Computed tokens by kind, as far as the engine reports them."""


def parse_evaluation_report(document: Mapping[str, Json]) -> EvaluationReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(EvaluationReport, document, kind="an eval")


# The report of a pipeline: its steps, and their results on tasks that no step has seen.


class PipelineStep(Record):
    """One step, which is a run of its own."""

    name: Text = ""
    loop: Text = ""
    run: Text = ""
    made_from: tuple[Text, ...] = ()
    """Runs whose parts its config uses."""
    result: Text = ""
    """Summary of its own report."""
    seconds: Measured = None


class PipelineReport(EvaluationReport):
    """The base model and the adapter of every step, in order."""

    kind: Literal["pipeline"] = "pipeline"  # type: ignore[assignment]
    steps: tuple[PipelineStep, ...] = ()


def parse_pipeline_report(document: Mapping[str, Json]) -> PipelineReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(PipelineReport, document, kind="a pipeline")


# The report of a supervised fine-tuning.


class SftReport(Report):
    """A training's data and losses. `rookery eval` measures the adapter."""

    kind: Literal["sft"] = "sft"
    run: Text = ""
    model: Text = ""
    taskset: Text = ""
    split: Text = ""
    seed: int = 0
    num_rows: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    """Answer tokens over all steps."""
    spent: SpentRecord = SpentRecord()
    stop_reason: Text = ""
    """Why a budget ended it early; empty if none did."""
    first_loss: Measured = None
    """Mean -log p per answer token of the first batch, before the first step."""
    last_loss: Measured = None
    rank: int = 0
    version: Text = ""
    """Content hash of the adapter."""
    seconds: Measured = None


def parse_sft_report(document: Mapping[str, Json]) -> SftReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(SftReport, document, kind="an sft")


# The state of a service: queues, tenants, speed.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One of the two queues."""

    name: str
    num_waiting: int
    tokens_waiting: int
    tokens_per_s: float
    """Speed while busy; 0 before the first request."""

    @property
    def wait_s(self) -> float | None:
        """Seconds until the queue is empty; None while the speed is unknown."""
        return self.tokens_waiting / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """One tenant's requests and models, and tokens since the service started."""

    name: str
    num_pending: int
    """Waiting and running requests."""
    num_models: int
    """Models in training."""
    num_checkpoints: int
    tokens: dict[str, int]
    """Tokens by kind: trained, sampled, prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """The state of the whole service."""

    models: tuple[str, ...]
    queues: tuple[QueueStatus, ...]
    tenants: tuple[TenantStatus, ...]
    journal_bytes: int
    """Journal bytes since the last snapshot."""
