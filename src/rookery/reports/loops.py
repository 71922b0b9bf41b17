"""The reports of genome, grpo and icm, and of loops without a report of their own.

report = parse_genome_report(json.loads(path.read_text()))
report.winner.mean          # None if it was not measured
report = parse_grpo_report(json.loads(path.read_text()))
report.trained.gain.low      # above 0: better than the start, beyond chance

"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rookery.reports.record import (
    Estimate,
    Measured,
    Record,
    Report,
    SampledRecord,
    SpentRecord,
    Text,
    parse_record,
)
from rookery.types import Json

__all__ = [
    "AgreementRecord",
    "CandidateRecord",
    "ChainRecord",
    "CheckpointRecord",
    "ExampleRecord",
    "GenerationRecord",
    "GenomeReport",
    "GoldRecord",
    "GrpoReport",
    "IcmReport",
    "IcmRow",
    "ItemRecord",
    "LineageRecord",
    "LoopReport",
    "ReportRow",
    "SettingRow",
    "StepRecord",
    "SupportRecord",
    "SweepRecord",
    "SweptAdapter",
    "TasksetRecord",
    "TokensRecord",
    "TrainStepRecord",
    "TransferRecord",
    "parse_genome_report",
    "parse_grpo_report",
    "parse_icm_report",
    "parse_loop_report",
]


class TasksetRecord(Record):
    """One taskset of the run, with the sizes of its splits."""

    name: Text = ""
    weight: Measured = None
    num_search: int = 0
    num_select: int = 0
    num_report: int = 0
    num_questions: int = 0
    """Independent questions among the report tasks; 0 if not recorded."""
    temperature: Measured = None
    """Temperature of measured answers; 0 is greedy."""


class ReportRow(Estimate):
    """One line of the comparison on the report tasks: the winner or a baseline."""

    name: Text = ""
    is_winner: bool = False
    gain: Estimate | None = None
    """Gain over the baseline (the best founder, or the start of a training), paired by task; None
    for the baseline."""
    lead: Estimate | None = None
    """Difference to the winner, paired by task; None for the winner."""
    by_source: dict[Text, Measured] = Field(default_factory=dict)
    """Mean per taskset."""
    num_failed: int = 0
    sampled: SampledRecord | None = None
    """Set if `report.samples` is."""
    small: Text = ""
    """Why the sample is too small for its interval; empty if it is large enough."""
    note: Text = ""
    num_candidates: int = 0
    """Candidates that its search tried."""
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None


class LoopReport(Report):
    """Report of a loop without one of its own: its result beside baselines."""

    kind: Text = ""
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    tasksets: tuple[TasksetRecord, ...] = ()
    sentence: Text = ""
    """Summary of the loop and its result."""
    rows: tuple[ReportRow, ...] = ()
    seconds: Measured = None

    @property
    def winner(self) -> ReportRow | None:
        return next((row for row in self.rows if row.is_winner), None)


def parse_loop_report(document: Mapping[str, Json]) -> LoopReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(LoopReport, document, kind="a")


class CandidateRecord(Record):
    """One candidate on the search tasks."""

    id: Text = ""
    score: Measured = None
    violation: Measured = None
    """Sum of the distances below the floors; 0 if all are kept."""
    by_source: dict[Text, Measured] = Field(default_factory=dict)


class GenerationRecord(Record):
    """Scores of one generation on the search tasks, and its cost."""

    generation: int = 0
    """Number over all stages; 0 are the founders."""
    stage: Text = ""
    best: Measured = None
    """Best score so far."""
    mean: Measured = None
    worst: Measured = None
    scores: tuple[Measured, ...] = ()
    """Scores of this generation's candidates, without failed ones."""
    num_candidates: int = 0
    num_dropped: int = 0
    """Candidates that racing dropped before they saw every task."""
    num_failed: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None


class LineageRecord(Record):
    """Origin of one candidate."""

    id: Text = ""
    generation: int = 0
    operator: Text = ""
    parents: tuple[Text, ...] = ()
    weights: tuple[Measured, ...] = ()
    """One weight per parent; empty if the operator has no weights."""
    score: Measured = None
    is_winner: bool = False
    is_ancestor: bool = False
    """Whether the winner descends from it."""


class GenomeReport(Report):
    """Contents of the page and the table."""

    kind: Literal["genome"] = "genome"
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    tasksets: tuple[TasksetRecord, ...] = ()
    rows: tuple[ReportRow, ...] = ()
    generations: tuple[GenerationRecord, ...] = ()
    lineage: tuple[LineageRecord, ...] = ()
    winner_id: Text = ""
    """Id of the winning candidate in `lineage`."""
    population: tuple[CandidateRecord, ...] = ()
    """Candidates at the end of the search."""
    merit: Text = ""
    """Merit that candidates were compared by; `reward` if no answer had a certainty."""
    front: tuple[CandidateRecord, ...] = ()
    """Candidates that no other one beats on every taskset."""
    floors: dict[Text, Measured] = Field(default_factory=dict)
    """Least mean on the search tasks of each taskset."""
    num_candidates: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    spent: SpentRecord = SpentRecord()
    """Tokens of the search, without random search."""
    stop_reason: Text = ""
    """Why a budget ended the search early; empty if none did."""
    seconds: Measured = None

    @property
    def winner(self) -> ReportRow | None:
        """The winner's row; None before the report tasks were read."""
        return next((row for row in self.rows if row.is_winner), None)

    @property
    def sources(self) -> tuple[str, ...]:
        """Tasksets with a mean, in the order of `tasksets`, then of the rows."""
        measured = dict.fromkeys(source for row in self.rows for source in row.by_source)
        declared = dict.fromkeys(t.name for t in self.tasksets if t.name in measured)
        return tuple(declared | measured)


def parse_genome_report(document: Mapping[str, Json]) -> GenomeReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(GenomeReport, document, kind="a genome")


class CheckpointRecord(Record):
    """One checkpoint on the select tasks."""

    step: int = 0
    mean: Measured = None
    is_chosen: bool = False


class ExampleRecord(Record):
    """One completion to read."""

    task: Text = ""
    """Id of the task."""
    prompt: Text = ""
    reference: Text = ""
    text: Text = ""
    reward: Measured = None


class TrainStepRecord(Record):
    """One training step."""

    step: int = 0
    model_step: int = 0
    """Step whose weights drew the answers."""
    metrics: dict[Text, Measured] = Field(default_factory=dict)
    examples: tuple[ExampleRecord, ...] = ()


class SweptAdapter(Record):
    """One adapter of a sweep."""

    name: Text = ""
    """Name of its run in `adapters/`."""
    setting: Text = ""
    seed: int = 0
    select: Measured = None
    """Select score of its best checkpoint."""
    chosen_step: int = 0
    is_chosen: bool = False
    row: ReportRow | None = None
    rewards: tuple[Measured, ...] = ()
    """Mean reward of the drawn answers, by step."""
    error: Text = ""
    """Why its training failed; a failed adapter is neither chosen nor measured."""


class SettingRow(ReportRow):
    """All seeds of one setting: their mean reward on the report tasks."""

    num_seeds: int = 0
    select: Measured = None
    """Mean over its adapters; None if one of them has no score."""


class SweepRecord(Record):
    """The adapters of a sweep, best first."""

    settings: tuple[SettingRow, ...] = ()
    adapters: tuple[SweptAdapter, ...] = ()
    num_rollouts: int = 0
    num_tokens: int = 0


class GrpoReport(Report):
    """Contents of the page and the table."""

    kind: Literal["grpo"] = "grpo"
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    loss: Text = ""
    advantages: Text = ""
    staleness: int = 0
    game: Text = ""
    """Function of the game; empty if each task has one answer."""
    tasksets: tuple[TasksetRecord, ...] = ()
    rows: tuple[ReportRow, ...] = ()
    chosen_step: int | None = None
    checkpoints: tuple[CheckpointRecord, ...] = ()
    steps: tuple[TrainStepRecord, ...] = ()
    sweep: SweepRecord | None = None
    """All adapters of a sweep; the other fields are about the chosen one."""
    num_rollouts: int = 0
    num_tokens: int = 0
    spent: SpentRecord = SpentRecord()
    stop_reason: Text = ""
    """Why a budget ended it early; empty if none did."""
    seconds: Measured = None

    @property
    def trained(self) -> ReportRow | None:
        """The chosen checkpoint's row; None before the report tasks were read."""
        return next((row for row in self.rows if row.is_winner), None)


def parse_grpo_report(document: Mapping[str, Json]) -> GrpoReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(GrpoReport, document, kind="a grpo")


class AgreementRecord(Record):
    """Agreement of labels with others, and its expectation by chance."""

    accuracy: Measured = None
    """Share of equal labels; in a row, share of true ones if those were given."""
    low: Measured = None
    high: Measured = None
    chance: Measured = None


class GoldRecord(AgreementRecord):
    """The result beside the true labels."""

    utility: Measured = None
    """U of the true labels, if all are known."""


class TransferRecord(AgreementRecord):
    """Agreement of a batch's labels with those predicted from the first batch."""

    batch: int = 0


class SupportRecord(Record):
    """Mutual support of the labels, beside the best labels of random models."""

    strength: Measured = None
    """0 to 1; 1 if every influence between items agrees with these labels."""
    gain: Measured = None
    """Rise of the labels' mutual log-odds, in standard deviations of random labels."""
    random_gain: Measured = None
    """Gain of the best labels of a random model with as many questions."""
    p: Measured = None
    """Share of random models whose best labels gain as much."""


class IcmRow(AgreementRecord):
    """One way to label the items."""

    name: Text = ""
    is_winner: bool = False
    note: Text = ""
    num_labelled: int = 0
    balance: dict[Text, int] = Field(default_factory=dict)
    num_violated: int = 0
    """Pairs of items that break a constraint."""
    utility: Measured = None
    agreement: Measured = None
    """Share of labels equal to the search's."""


class StepRecord(Record):
    """State of a chain after one decision."""

    iteration: int = 0
    utility: Measured = None
    best: Measured = None
    temperature: Measured = None
    num_labelled: int = 0
    num_frustrated: int = 0
    counts: tuple[int, ...] = ()


class ChainRecord(Record):
    """One search of one batch."""

    batch: int = 0
    chain: int = 0
    is_best: bool = False
    origin: Text = ""
    """Labels it began with; without iterations, how the labels were made."""
    num_iterations: int = 0
    num_accepted: int = 0
    num_labelled: int = 0
    num_frustrated: int = 0
    is_settled: bool = False
    utility: Measured = None
    steps: tuple[StepRecord, ...] = ()


class ItemRecord(Record):
    """One item and its label."""

    id: Text = ""
    text: Text = ""
    label: Text | None = None
    """None if the item is not labelled."""
    margin: Measured = None


class TokensRecord(Record):
    """Prompt tokens of the search."""

    naive: int = 0
    requested: int = 0
    computed: int = 0
    baselines: int = 0
    """Tokens computed for the rows without a search."""
    num_requests: int = 0


class IcmReport(Report):
    """Contents of the page and the table."""

    kind: Literal["icm"] = "icm"
    run: Text = ""
    model: Text = ""
    data: Text = ""
    seed: int | None = None
    labels: tuple[Text, ...] = ()
    num_items: int = 0
    num_labelled: int = 0
    num_groups: int = 0
    """Independent questions: items of one group, or tied by a constraint, are one."""
    verdict: Text = ""
    support: SupportRecord | None = None
    utility: Measured = None
    num_frustrated: int = 0
    num_violated: int = 0
    mass: Measured = None
    """Mean probability of all labels together, among all next tokens."""
    balance: dict[Text, int] = Field(default_factory=dict)
    gold: GoldRecord | None = None
    """None if no true labels were given."""
    transfers: tuple[TransferRecord, ...] = ()
    num_unanswered: int = 0
    """Contexts that the engine failed to answer."""
    rows: tuple[IcmRow, ...] = ()
    chains: tuple[ChainRecord, ...] = ()
    items: tuple[ItemRecord, ...] = ()
    tokens: TokensRecord = TokensRecord()
    spent: SpentRecord = SpentRecord()
    """A read of an item's labels counts as one token."""
    stop_reason: Text = ""
    """Why a budget ended a search early; empty if none did."""
    seconds: Measured = None

    @property
    def label_by_id(self) -> dict[str, str | None]:
        """Label of every item; None if it has no label."""
        return {item.id: item.label for item in self.items}


def parse_icm_report(document: Mapping[str, Json]) -> IcmReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(IcmReport, document, kind="an icm")
