"""The report of an evolution of programs: what `report.json` of an evolve run holds.

report = parse_evolve_report(json.loads(path.read_text()))
report.best.score           # None when nothing was measured
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rookery.reports.loops import ReportRow, TasksetRecord
from rookery.reports.record import Measured, Record, Report, SpentRecord, Text, parse_record
from rookery.types import Json

__all__ = [
    "ArmRecord",
    "BaselineRecord",
    "CellRecord",
    "CurvePoint",
    "EvolveReport",
    "FailureRecord",
    "FinalistRow",
    "LearnedRow",
    "OperatorRow",
    "PaidTokensRecord",
    "ProgramRow",
    "TasksReport",
    "parse_evolve_report",
]


class CurvePoint(Record):
    """A new best score. Between two points the best did not change."""

    iteration: int = 0
    """Iteration that found it; 0 for a first program."""
    num_decided: int = 0
    """Iterations decided by then: the x axis of a curve in the order of decisions."""
    best: Measured = None
    program: Text = ""


class CellRecord(Record):
    """A cell of an island's feature grid and the program that holds it."""

    island: int = 0
    cell: Text = ""
    """One bin for each feature dimension: "3-7"."""
    program: Text = ""
    score: Measured = None


class ProgramRow(Record):
    """One program."""

    id: Text = ""
    iteration: int = 0
    generation: int = 0
    island: int = 0
    parent: Text = ""
    score: Measured = None
    metrics: dict[Text, Measured] = Field(default_factory=dict)
    model: Text = ""
    changes: Text = ""
    """Summary of the change, by the model."""
    diff: Text = ""
    """Unified diff against its parent; empty for a first program."""
    code: Text = ""
    """Source code; only the best program has it."""


class FailureRecord(Record):
    """Iterations that gave no program, grouped by reason."""

    kind: Text = ""
    count: int = 0
    first_iteration: int = 0
    first_message: Text = ""


class PaidTokensRecord(Record):
    """Paid tokens; missing if a model does not report them."""

    prompt: int | None = None
    completion: int | None = None


class ArmRecord(Record):
    """One model or adapter of the ensemble."""

    name: Text = ""
    weight: Measured = None
    num_plays: int = 0
    gain: Measured = None
    """Sum of the score's improvements over the parents."""
    cost: Measured = None
    """Spent tokens."""


class LearnedRow(Record):
    """One training of the proposer (`learn`), and the results of its adapter."""

    name: Text = ""
    """Name of the new model."""
    iteration: int = 0
    """Iterations decided when it joined."""
    num_answers: int = 0
    """Answers available for the training."""
    num_rows: int = 0
    """Answers in the training data."""
    num_groups: int = 0
    """Distinct parents of these answers."""
    tokens: int = 0
    """Trained tokens, over all epochs."""
    seconds: Measured = None
    loss: Measured = None
    """Loss per token in the last step."""
    error: Text = ""
    """Why the training gave no adapter; empty if it gave one."""
    models: tuple[ArmRecord, ...] = ()
    """Share and gains of each model until the next training, or the end."""


class OperatorRow(Record):
    """One operator of the adaptive search, which makes children in one way."""

    name: Text = ""
    num_given: int = 0
    """Iterations it was given."""
    num_accepted: int = 0
    """Iterations that gave a program."""
    num_improved: int = 0
    """Programs that were a new best."""
    tokens: Measured = None
    """Missing if a model does not report them."""


class BaselineRecord(Record):
    """A simpler search under the same budget."""

    name: Text = ""
    best: Measured = None
    num_iterations: int = 0
    num_failed: int = 0
    tokens: PaidTokensRecord = PaidTokensRecord()
    num_tuning_evaluations: int = 0
    note: Text = ""


class FinalistRow(Record):
    """A prompt that was compared on the select tasks."""

    id: Text = ""
    iteration: int = 0
    search: Measured = None
    select: Measured = None
    """Missing if there are no select tasks, or an answer to one has no reward."""
    error: Text = ""


class TasksReport(Record):
    """Prompts on tasks: chosen on the select tasks, measured once on the report tasks."""

    taskset: TasksetRecord = TasksetRecord()
    num_search: int = 0
    """Search tasks in use."""
    model: Text = ""
    """Name of the answering model."""
    num_rollouts: int = 0
    """Answers drawn by the search."""
    num_final_rollouts: int = 0
    """Answers to the select and the report tasks."""
    num_choice_tokens: int = 0
    """Tokens of the answers to the select tasks."""
    finalists: tuple[FinalistRow, ...] = ()
    chosen: Text = ""
    """Id of the chosen prompt."""
    rows: tuple[ReportRow, ...] = ()
    """The chosen and the first prompt on the report tasks; empty without report tasks."""


class EvolveReport(Report):
    """Contents of the page and the table."""

    kind: Literal["evolve"] = "evolve"
    run: Text = ""
    models: tuple[ArmRecord, ...] = ()
    seed: int | None = None
    mode: Text = ""
    strategy: Text = ""
    """`adaptive` or `openevolve`."""
    operators: tuple[OperatorRow, ...] = ()
    learned: tuple[LearnedRow, ...] = ()
    """The trainings of the proposer, in order."""
    language: Text = ""
    feature_dimensions: tuple[Text, ...] = ()
    bins: tuple[int, ...] = ()
    """Number of bins per feature dimension."""
    num_iterations: int = 0
    """Decided iterations, committed and failed."""
    num_committed: int = 0
    num_failed: int = 0
    failed_share: Measured = None
    """Share of failed iterations; missing before the first."""
    num_islands: int = 0
    num_programs: int = 0
    """Programs in the population."""
    stop_reason: Text = ""
    spent: SpentRecord = SpentRecord()
    """Why the run ended early; empty if all iterations were done."""
    first: ProgramRow | None = None
    """The best of the first programs."""
    best: ProgramRow | None = None
    winning_line: tuple[ProgramRow, ...] = ()
    """The best program's ancestors in order, from a first program to itself."""
    curve: tuple[CurvePoint, ...] = ()
    cells: tuple[CellRecord, ...] = ()
    front: tuple[ProgramRow, ...] = ()
    """Pareto front of the objectives; empty without objectives."""
    objectives: tuple[Text, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    """Reasons of failed iterations, most frequent first."""
    num_demoted: int = 0
    """Programs that lost their best score when it was confirmed."""
    staleness: dict[Text, int] = Field(default_factory=dict)
    """Iterations decided between an iteration's plan and its decision -> number of iterations."""
    tokens: PaidTokensRecord = PaidTokensRecord()
    usd: Measured = None
    """Cost by the prices of the config; missing without prices."""
    seconds: Measured = None
    """Wall-clock seconds over all sessions of the run."""
    evaluation_seconds: Measured = None
    """Seconds summed over all evaluations."""
    num_tuning_evaluations: int = 0
    """Evaluations by `tune`, which cost no tokens."""
    num_workers_lost: int = 0
    baselines: tuple[BaselineRecord, ...] = ()
    tasks: TasksReport | None = None
    """Set if programs are prompts."""
    is_forgeable: bool = False
    """Whether programs ran in the evaluator's process, so that they could forge scores."""


def parse_evolve_report(document: Mapping[str, Json]) -> EvolveReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(EvolveReport, document, kind="an evolve")
