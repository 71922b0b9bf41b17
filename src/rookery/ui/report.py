"""The report of a genome run as records: what `report.json` holds, complete or cut short.

    report = parse_report(json.loads(path.read_text()))
    report.winner.mean          # None when it was not measured; a missing number stays missing

A run that was interrupted has fewer keys, so every field has an empty default. Keys that are
not known here are left out: an older page can show a newer report.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from rookery.errors import RunError
from rookery.types import Json

__all__ = [
    "CandidateRecord",
    "Estimate",
    "GenerationRecord",
    "GenomeReport",
    "LineageRecord",
    "Measured",
    "Record",
    "ReportRow",
    "TasksetRecord",
    "Text",
    "parse_report",
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


class Estimate(Record):
    """A mean and its 95 % interval."""

    mean: Measured = None
    low: Measured = None
    high: Measured = None


class TasksetRecord(Record):
    """One taskset of the run and how many of its tasks each split took."""

    name: Text = ""
    weight: Measured = None
    num_search: int = 0
    num_select: int = 0
    num_report: int = 0


class ReportRow(Estimate):
    """One line of the comparison on the report tasks: the winner or a baseline."""

    name: Text = ""
    is_winner: bool = False
    gain: Estimate | None = None
    """Over the best founder, paired by task; None for the best founder itself."""
    by_source: dict[Text, Measured] = {}
    """Mean per taskset."""
    num_failed: int = 0
    note: Text = ""
    num_candidates: int = 0
    """Candidates that were tried to find it."""
    num_tokens: int = 0
    seconds: Measured = None


class CandidateRecord(Record):
    """One candidate on the search tasks."""

    id: Text = ""
    score: Measured = None
    by_source: dict[Text, Measured] = {}


class GenerationRecord(Record):
    """What one generation scored on the search tasks, and what it cost."""

    generation: int = 0
    stage: Text = ""
    best: Measured = None
    """Of all candidates so far."""
    mean: Measured = None
    worst: Measured = None
    scores: tuple[Measured, ...] = ()
    """Of this generation's candidates."""
    num_candidates: int = 0
    num_dropped: int = 0
    num_failed: int = 0
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


class GenomeReport(Record):
    """Everything the page and the table show."""

    kind: Literal["genome"] = "genome"
    run: Text = ""
    model: Text = ""
    seed: int | None = None
    tasksets: tuple[TasksetRecord, ...] = ()
    rows: tuple[ReportRow, ...] = ()
    generations: tuple[GenerationRecord, ...] = ()
    lineage: tuple[LineageRecord, ...] = ()
    population: tuple[CandidateRecord, ...] = ()
    """The candidates that the search ended with."""
    front: tuple[CandidateRecord, ...] = ()
    """Those that no other candidate beats on every taskset."""
    num_candidates: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: Measured = None
    warnings: tuple[Text, ...] = ()

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


def parse_report(document: Mapping[str, Json]) -> GenomeReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    try:
        return GenomeReport.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise RunError(
            f"The report cannot be shown: {where} is {first['input']!r:.80}, and "
            f"{first['msg'].lower()}. Give the report.json of a genome run as it was written."
        ) from None
