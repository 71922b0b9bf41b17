"""What `report.json` of a genome, a grpo, an icm run holds, and of loops without one of their own.

report = parse_genome_report(json.loads(path.read_text()))
report.winner.mean          # None when it was not measured
report = parse_grpo_report(json.loads(path.read_text()))
report.trained.gain.low      # above 0: better than the start, and not by chance

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
    """One taskset of the run and how many of its tasks each split took."""

    name: Text = ""
    weight: Measured = None
    num_search: int = 0
    num_select: int = 0
    num_report: int = 0
    num_questions: int = 0
    """Of the report tasks: those of one question are not independent. 0: not recorded."""
    temperature: Measured = None
    """At which answers were drawn to be measured; 0 is greedy."""


class ReportRow(Estimate):
    """One line of the comparison on the report tasks: the winner or a baseline."""

    name: Text = ""
    is_winner: bool = False
    gain: Estimate | None = None
    """Over the baseline, paired by task; None for the baseline itself: the best founder, or what a
    training began with."""
    lead: Estimate | None = None
    """Over the winner, paired by task; None for the winner itself."""
    by_source: dict[Text, Measured] = Field(default_factory=dict)
    """Mean per taskset."""
    num_failed: int = 0
    sampled: SampledRecord | None = None
    """Where `report.samples` asks for it."""
    small: Text = ""
    """Why the sample is too small to rely on the interval; empty when it is not."""
    note: Text = ""
    num_candidates: int = 0
    """Candidates that were tried to find it."""
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None


class LoopReport(Report):
    """Of a loop without a report of its own: its result beside what it is compared with."""

    kind: Text = ""
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    tasksets: tuple[TasksetRecord, ...] = ()
    sentence: Text = ""
    """What the loop did, and what its result shows."""
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
    """How far it misses the floors, summed; 0 keeps them all."""
    by_source: dict[Text, Measured] = Field(default_factory=dict)


class GenerationRecord(Record):
    """What one generation scored on the search tasks, and what it cost."""

    generation: int = 0
    """Counted over all stages; 0 are the founders."""
    stage: Text = ""
    best: Measured = None
    """Of all candidates so far."""
    mean: Measured = None
    worst: Measured = None
    scores: tuple[Measured, ...] = ()
    """Of this generation's candidates that did not fail."""
    num_candidates: int = 0
    num_dropped: int = 0
    """Left the race before they saw every task."""
    num_failed: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None


class LineageRecord(Record):
    """How one candidate was made."""

    id: Text = ""
    generation: int = 0
    operator: Text = ""
    parents: tuple[Text, ...] = ()
    weights: tuple[Measured, ...] = ()
    """One for each parent; empty when the operator has none."""
    score: Measured = None
    is_winner: bool = False
    is_ancestor: bool = False
    """Whether the winner descends from it."""


class GenomeReport(Report):
    """Everything the page and the table show."""

    kind: Literal["genome"] = "genome"
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    tasksets: tuple[TasksetRecord, ...] = ()
    rows: tuple[ReportRow, ...] = ()
    generations: tuple[GenerationRecord, ...] = ()
    lineage: tuple[LineageRecord, ...] = ()
    winner_id: Text = ""
    """The winning candidate, as `lineage` names it."""
    population: tuple[CandidateRecord, ...] = ()
    """The candidates that the search ended with."""
    merit: Text = ""
    """What candidates were compared by; `reward` where no answer had a certainty."""
    front: tuple[CandidateRecord, ...] = ()
    """Those that no other candidate beats on every taskset."""
    floors: dict[Text, Measured] = Field(default_factory=dict)
    """By taskset, the mean on its search tasks that no candidate may fall below."""
    num_candidates: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    spent: SpentRecord = SpentRecord()
    """Without that of random search."""
    stop_reason: Text = ""
    """Why a budget ended the search before its last generation."""
    seconds: Measured = None

    @property
    def winner(self) -> ReportRow | None:
        """The first row marked as winner; None before the report tasks were read."""
        return next((row for row in self.rows if row.is_winner), None)

    @property
    def sources(self) -> tuple[str, ...]:
        """Every taskset with a mean, in the order of `tasksets`, then of the rows."""
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
    spent: SpentRecord = SpentRecord()
    stop_reason: Text = ""
    """Why a budget ended it before its last step."""
    seconds: Measured = None

    @property
    def trained(self) -> ReportRow | None:
        """The row of the chosen checkpoint; None before the report tasks were read."""
        return next((row for row in self.rows if row.is_winner), None)


def parse_grpo_report(document: Mapping[str, Json]) -> GrpoReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(GrpoReport, document, kind="a grpo")


class AgreementRecord(Record):
    """How far labels agree with others, and how far they would by chance."""

    accuracy: Measured = None
    """Share of labels that are the same; in a row, as the true ones, where these were given."""
    low: Measured = None
    high: Measured = None
    chance: Measured = None


class GoldRecord(AgreementRecord):
    """The result beside the true labels."""

    utility: Measured = None
    """Of the true labels themselves, where all are known."""


class TransferRecord(AgreementRecord):
    """The labels of a batch beside those that the first batch's predict."""

    batch: int = 0


class SupportRecord(Record):
    """How far the labels support one another, beside the best labels of random models."""

    strength: Measured = None
    """0 to 1: 1 when all that labels do to one another goes along with these."""
    gain: Measured = None
    """How far they raise one another's log-odds, in standard deviations of what random ones do."""
    random_gain: Measured = None
    """Of the best labels of a random model of as many questions."""
    p: Measured = None
    """Part of random models whose best labels gain as much."""


class IcmRow(AgreementRecord):
    """One way to label the items."""

    name: Text = ""
    is_winner: bool = False
    note: Text = ""
    num_labelled: int = 0
    balance: dict[Text, int] = Field(default_factory=dict)
    num_violated: int = 0
    """Pairs that break a constraint."""
    utility: Measured = None
    agreement: Measured = None
    """Share of labels that are the same as the search's."""


class StepRecord(Record):
    """Where a chain stood after one decision."""

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
    """What it began with; without iterations, what made the labels."""
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
    """None when it has none."""
    margin: Measured = None


class TokensRecord(Record):
    """Prompt tokens of the search."""

    naive: int = 0
    requested: int = 0
    computed: int = 0
    baselines: int = 0
    """Computed for the rows that need no search."""
    num_requests: int = 0


class IcmReport(Report):
    """Everything the page and the table show."""

    kind: Literal["icm"] = "icm"
    run: Text = ""
    model: Text = ""
    data: Text = ""
    seed: int | None = None
    labels: tuple[Text, ...] = ()
    num_items: int = 0
    num_labelled: int = 0
    num_groups: int = 0
    """Questions: of items of one group, or that constraints tie together."""
    verdict: Text = ""
    support: SupportRecord | None = None
    utility: Measured = None
    num_frustrated: int = 0
    num_violated: int = 0
    mass: Measured = None
    """Mean probability that the model gives to the labels, of all that could follow."""
    balance: dict[Text, int] = Field(default_factory=dict)
    gold: GoldRecord | None = None
    """None when no true labels were given."""
    transfers: tuple[TransferRecord, ...] = ()
    num_unanswered: int = 0
    """Contexts that the engine could not answer."""
    rows: tuple[IcmRow, ...] = ()
    chains: tuple[ChainRecord, ...] = ()
    items: tuple[ItemRecord, ...] = ()
    tokens: TokensRecord = TokensRecord()
    spent: SpentRecord = SpentRecord()
    """A read of an item's labels counts as one token."""
    stop_reason: Text = ""
    """Why a budget ended a search before its last iteration."""
    seconds: Measured = None

    @property
    def label_by_id(self) -> dict[str, str | None]:
        """The label of every item; None where it has none."""
        return {item.id: item.label for item in self.items}


def parse_icm_report(document: Mapping[str, Json]) -> IcmReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(IcmReport, document, kind="an icm")
