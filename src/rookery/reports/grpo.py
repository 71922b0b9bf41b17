"""The report of a training from rewards: what `report.json` of a grpo run holds.

report = parse_grpo_report(json.loads(path.read_text()))
report.trained.gain.low      # above 0: better than the start, and not by chance
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rookery.reports.genome import ReportRow, TasksetRecord
from rookery.reports.record import Measured, Record, Report, Text, parse_record
from rookery.types import Json

__all__ = [
    "CheckpointRecord",
    "ExampleRecord",
    "GrpoReport",
    "SettingRow",
    "SweepRecord",
    "SweptAdapter",
    "TrainStepRecord",
    "parse_grpo_report",
]


class CheckpointRecord(Record):
    """One checkpoint on the select tasks."""

    step: int = 0
    mean: Measured = None
    is_chosen: bool = False


class ExampleRecord(Record):
    """One completion to read."""

    task: Text = ""
    """Its id."""
    prompt: Text = ""
    reference: Text = ""
    text: Text = ""
    reward: Measured = None


class TrainStepRecord(Record):
    """One training step."""

    step: int = 0
    model_step: int = 0
    """The step whose weights drew its answers."""
    metrics: dict[Text, Measured] = Field(default_factory=dict)
    examples: tuple[ExampleRecord, ...] = ()


class SweptAdapter(Record):
    """One adapter of a sweep."""

    name: Text = ""
    """Its run is `adapters/NAME`."""
    setting: Text = ""
    seed: int = 0
    select: Measured = None
    """Of its best checkpoint."""
    chosen_step: int = 0
    is_chosen: bool = False
    row: ReportRow | None = None
    rewards: tuple[Measured, ...] = ()
    """Of the drawn answers, by step."""
    error: Text = ""
    """Why it could not be trained to its end; such a one is neither chosen nor measured."""


class SettingRow(ReportRow):
    """All seeds of one setting: what they earned on the report tasks on average."""

    num_seeds: int = 0
    select: Measured = None
    """The mean of its adapters; None where one of them has none."""


class SweepRecord(Record):
    """Many trainings in one, the best first."""

    settings: tuple[SettingRow, ...] = ()
    adapters: tuple[SweptAdapter, ...] = ()
    num_rollouts: int = 0
    num_tokens: int = 0


class GrpoReport(Report):
    """Everything the page and the table show."""

    kind: Literal["grpo"] = "grpo"
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    loss: Text = ""
    advantages: Text = ""
    staleness: int = 0
    game: Text = ""
    """The function that was played; empty: one answer to each task."""
    tasksets: tuple[TasksetRecord, ...] = ()
    rows: tuple[ReportRow, ...] = ()
    chosen_step: int | None = None
    checkpoints: tuple[CheckpointRecord, ...] = ()
    steps: tuple[TrainStepRecord, ...] = ()
    sweep: SweepRecord | None = None
    """Where many adapters were trained: all of them. The rest is about the chosen one."""
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None

    @property
    def trained(self) -> ReportRow | None:
        """The row of the chosen checkpoint; None before the report tasks were read."""
        return next((row for row in self.rows if row.is_winner), None)


def parse_grpo_report(document: Mapping[str, Json]) -> GrpoReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(GrpoReport, document, kind="a grpo")
