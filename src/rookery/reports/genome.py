"""The report of an evolution of adapters: what `report.json` of a genome run holds.

report = parse_genome_report(json.loads(path.read_text()))
report.winner.mean          # None when it was not measured
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
    Text,
    parse_record,
)
from rookery.types import Json

__all__ = [
    "CandidateRecord",
    "GenerationRecord",
    "GenomeReport",
    "LineageRecord",
    "ReportRow",
    "TasksetRecord",
    "parse_genome_report",
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
