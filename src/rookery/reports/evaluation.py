"""The report of an evaluation: what `report.json` of an eval run holds."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rookery.reports.record import Estimate, Measured, Record, TaskRecord, Text, parse_record
from rookery.types import Json

__all__ = ["EvaluationReport", "ModelRow", "parse_evaluation_report"]


class ModelRow(Estimate):
    """One model on the tasks: its mean with the interval, and how much it is above the base."""

    name: Text = ""
    version: Text = ""
    num_scored: int = 0
    num_failed: int = 0
    first_error: Text = ""
    gain: Estimate | None = None
    """Over the base model, paired by task; None for the base model itself."""


class EvaluationReport(Record):
    """A model and its adapters on one taskset."""

    kind: Literal["eval"] = "eval"
    run: Text = ""
    model: Text = ""
    taskset: Text = ""
    num_tasks: int = 0
    num_questions: int = 0
    """Tasks of one question are not independent. 0: not recorded."""
    num_skipped_rows: int = 0
    warnings: tuple[Text, ...] = ()
    models: tuple[ModelRow, ...] = ()
    tasks: tuple[TaskRecord, ...] = ()
    """The first ones, with the answers of all models; the run's events have all."""
    seconds: Measured = None
    tokens: dict[Text, int] = Field(default_factory=dict)
    """What was computed, as far as the engine tells."""


def parse_evaluation_report(document: Mapping[str, Json]) -> EvaluationReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(EvaluationReport, document, kind="an eval")
