"""What every report is made of: frozen records whose missing numbers stay missing.

A run that was interrupted has fewer keys, so every field has an empty default. Keys that are not
known here are left out: an older page can show a newer report.
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
    """Half of a surrogate pair is legal in JSON and cannot be written as UTF-8."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""A number that may be missing. NaN and infinities are missing: no chart can place them."""
Text = Annotated[str, BeforeValidator(_encodable)]


class Record(BaseModel):
    """The parent of the records: frozen; null is the same as a missing key."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            return {key: value for key, value in document.items() if value is not None}
        return document


class Report(Record):
    """The parent of the reports, which notebooks show as HTML."""

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
    """Tokens of answers that finding the result took, without those of the report."""

    drawn_tokens: int = 0
    """Drawn, or chosen."""
    trained_tokens: int = 0
    """As often as they were trained on."""

    @property
    def tokens(self) -> int:
        return self.drawn_tokens + self.trained_tokens


class SampledRecord(Record):
    """Several answers to each report task, drawn at random."""

    num: int = 0
    """Answers to each task."""
    pass_at: dict[int, Estimate] = Field(default_factory=dict)
    """By k, the best reward of k answers on average: for right and wrong answers the unbiased
    pass@k."""
    majority: Estimate = Estimate()
    """What the answer that most gave has earned."""
    num_failed: int = 0
    """Tasks with an answer that failed; with any there are no means."""


class AnswerRecord(Record):
    """One answer to read."""

    name: Text = ""
    """Of the model that gave it."""
    text: Text = ""
    reward: Measured = None
    error: Text = ""


class TaskRecord(Record):
    """One task with answers to it."""

    task: Text = ""
    """Its id."""
    prompt: Text = ""
    reference: Text = ""
    answers: tuple[AnswerRecord, ...] = ()


def describe_task(task: Task) -> dict[str, str]:
    """The prompt and the reference of a task as texts to read."""
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


# The report of an evaluation: what `report.json` of an eval run holds.


class ModelRow(Estimate):
    """One model on the tasks: its mean with the interval, and how much it is above the base."""

    name: Text = ""
    version: Text = ""
    num_scored: int = 0
    num_failed: int = 0
    first_error: Text = ""
    gain: Estimate | None = None
    """Over the base model, paired by task; None for the base model itself."""
    sampled: SampledRecord | None = None
    """Where `report.samples` asks for it."""


class EvaluationReport(Report):
    """A model and its adapters on one taskset."""

    kind: Literal["eval"] = "eval"
    run: Text = ""
    model: Text = ""
    taskset: Text = ""
    num_tasks: int = 0
    num_questions: int = 0
    """Tasks of one question are not independent. 0: not recorded."""
    num_skipped_rows: int = 0
    models: tuple[ModelRow, ...] = ()
    tasks: tuple[TaskRecord, ...] = ()
    """The first ones, with the answers of all models; the run's events have all."""
    seconds: Measured = None
    tokens: dict[Text, int] = Field(default_factory=dict)
    """What was computed, as far as the engine tells."""


def parse_evaluation_report(document: Mapping[str, Json]) -> EvaluationReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(EvaluationReport, document, kind="an eval")


# The report of a pipeline: its steps, and what each left on tasks that none has seen.


class PipelineStep(Record):
    """One step: a run of its own."""

    name: Text = ""
    loop: Text = ""
    run: Text = ""
    made_from: tuple[Text, ...] = ()
    """Runs that its config takes something from."""
    result: Text = ""
    """What its own report is about, in short."""
    seconds: Measured = None


class PipelineReport(EvaluationReport):
    """The base model and the adapter of every step, in their order."""

    kind: Literal["pipeline"] = "pipeline"  # type: ignore[assignment]
    steps: tuple[PipelineStep, ...] = ()


def parse_pipeline_report(document: Mapping[str, Json]) -> PipelineReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(PipelineReport, document, kind="a pipeline")


# The report of a supervised fine-tuning.


class SftReport(Report):
    """What was trained, on how much. How good it is, an evaluation tells."""

    kind: Literal["sft"] = "sft"
    run: Text = ""
    model: Text = ""
    taskset: Text = ""
    split: Text = ""
    seed: int = 0
    num_rows: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    """Of answers, in all steps."""
    spent: SpentRecord = SpentRecord()
    stop_reason: Text = ""
    """Why a budget ended it early."""
    first_loss: Measured = None
    """-log p per token of the answers of the first step, before it."""
    last_loss: Measured = None
    rank: int = 0
    version: Text = ""
    """Of the adapter."""
    seconds: Measured = None


def parse_sft_report(document: Mapping[str, Json]) -> SftReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(SftReport, document, kind="an sft")


# The service as it is now: its queues, its tenants and how fast it is.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One of the two queues."""

    name: str
    num_waiting: int
    tokens_waiting: int
    tokens_per_s: float
    """While there is work; 0 before the first."""

    @property
    def wait_s(self) -> float | None:
        """Until the last one is done; None when the speed is not known."""
        return self.tokens_waiting / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """What one tenant has, and what was computed for it since the service started."""

    name: str
    num_pending: int
    """Requests that wait or run."""
    num_models: int
    """In training."""
    num_checkpoints: int
    tokens: dict[str, int]
    """By kind: trained, sampled, prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """All of it."""

    models: tuple[str, ...]
    queues: tuple[QueueStatus, ...]
    tenants: tuple[TenantStatus, ...]
    journal_bytes: int
    """Since the last snapshot."""
