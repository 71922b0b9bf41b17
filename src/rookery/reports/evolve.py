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
    """A new best score, and when it was found. Between two points the best did not change."""

    iteration: int = 0
    """0 for a first program."""
    num_decided: int = 0
    """Iterations decided by then: the axis of a curve in the order of commits."""
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
    """What the model said it changed, in short."""
    diff: Text = ""
    """Unified, against its parent; empty for a first program."""
    code: Text = ""
    """Only of the best program."""


class FailureRecord(Record):
    """Iterations that gave no program, for one reason."""

    kind: Text = ""
    count: int = 0
    first_iteration: int = 0
    first_message: Text = ""


class PaidTokensRecord(Record):
    """Tokens paid for; missing when a model does not report them."""

    prompt: int | None = None
    completion: int | None = None


class ArmRecord(Record):
    """One model or adapter of the ensemble."""

    name: Text = ""
    weight: Measured = None
    num_plays: int = 0
    gain: Measured = None
    """Improvements of the score over the parent, summed."""
    cost: Measured = None
    """Tokens."""


class LearnedRow(Record):
    """One training of the proposer (`learn`), and how its adapter did."""

    name: Text = ""
    """Of the model that joined."""
    iteration: int = 0
    """Iterations decided when it did."""
    num_answers: int = 0
    """That there were to learn from."""
    num_rows: int = 0
    """Those that it was trained on."""
    num_groups: int = 0
    """Programs that they are children of."""
    tokens: int = 0
    """Trained on, over all epochs."""
    seconds: Measured = None
    loss: Measured = None
    """Per token, of the last step."""
    error: Text = ""
    """Why there is no adapter; empty when there is one."""
    models: tuple[ArmRecord, ...] = ()
    """What each model was given and won from then until the next training, or the end."""


class OperatorRow(Record):
    """One way of making a child, of an adaptive search."""

    name: Text = ""
    num_given: int = 0
    """Iterations."""
    num_accepted: int = 0
    """Those that gave a program."""
    num_improved: int = 0
    """Programs that were the best when they were told."""
    tokens: Measured = None
    """Missing when a model does not report them."""


class BaselineRecord(Record):
    """A simpler search with as much to spend."""

    name: Text = ""
    best: Measured = None
    num_iterations: int = 0
    num_failed: int = 0
    tokens: PaidTokensRecord = PaidTokensRecord()
    num_tuning_evaluations: int = 0
    note: Text = ""


class FinalistRow(Record):
    """A prompt that met others on the select tasks."""

    id: Text = ""
    iteration: int = 0
    search: Measured = None
    select: Measured = None
    """Missing where there are no select tasks, or an answer to one has no reward."""
    error: Text = ""


class TasksReport(Record):
    """Prompts on tasks: chosen on the select tasks, measured once on the report tasks."""

    taskset: TasksetRecord = TasksetRecord()
    num_search: int = 0
    """Search tasks that were used."""
    model: Text = ""
    """Who answered."""
    num_rollouts: int = 0
    """Answers that the search took."""
    num_final_rollouts: int = 0
    """Answers to the select and the report tasks."""
    num_choice_tokens: int = 0
    """Of the answers to the select tasks."""
    finalists: tuple[FinalistRow, ...] = ()
    chosen: Text = ""
    """The id of the prompt that was chosen."""
    rows: tuple[ReportRow, ...] = ()
    """The chosen prompt and the first one on the report tasks; empty where there are none."""


class EvolveReport(Report):
    """Everything the page and the table show."""

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
    """Of the feature dimensions, in their order."""
    num_iterations: int = 0
    """Decided: committed and failed."""
    num_committed: int = 0
    num_failed: int = 0
    failed_share: Measured = None
    """Of the iterations; missing before the first."""
    num_islands: int = 0
    num_programs: int = 0
    """Kept in the population."""
    stop_reason: Text = ""
    spent: SpentRecord = SpentRecord()
    """Why it ended before all iterations were done; empty when they were."""
    first: ProgramRow | None = None
    """The best of the programs that the evolution started from."""
    best: ProgramRow | None = None
    winning_line: tuple[ProgramRow, ...] = ()
    """From the first program to the best, each the parent of the next."""
    curve: tuple[CurvePoint, ...] = ()
    cells: tuple[CellRecord, ...] = ()
    front: tuple[ProgramRow, ...] = ()
    """Programs that no other beats in every objective; empty without objectives."""
    objectives: tuple[Text, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    """Most frequent first."""
    num_demoted: int = 0
    """Programs that looked like the best and did not when they were scored again."""
    staleness: dict[Text, int] = Field(default_factory=dict)
    """Iterations decided between the plan of an iteration and its decision -> how many."""
    tokens: PaidTokensRecord = PaidTokensRecord()
    usd: Measured = None
    """By the prices of the config; missing when there are none."""
    seconds: Measured = None
    """Over all sessions of the run."""
    evaluation_seconds: Measured = None
    """Summed over all evaluations."""
    num_tuning_evaluations: int = 0
    """Evaluations of programs with other numbers (`tune`); they cost no tokens."""
    num_workers_lost: int = 0
    baselines: tuple[BaselineRecord, ...] = ()
    tasks: TasksReport | None = None
    """Where programs are prompts."""
    is_forgeable: bool = False
    """Whether programs ran in their evaluator's process, and so could write their own scores."""


def parse_evolve_report(document: Mapping[str, Json]) -> EvolveReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(EvolveReport, document, kind="an evolve")
