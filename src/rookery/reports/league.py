"""The report of a league: what `report.json` of a league run holds.

report = parse_league_report(json.loads(path.read_text()))
report.rows[0].name, report.rows[0].gain.low     # the best, and whether it beats the base model
"""

from collections.abc import Mapping
from typing import Literal

from rookery.reports.record import (
    Estimate,
    EvaluationReport,
    Measured,
    Record,
    SpentRecord,
    Text,
    parse_record,
)
from rookery.types import Json

__all__ = [
    "LeaguePair",
    "LeagueReport",
    "LeagueRow",
    "LeagueRun",
    "LeftOut",
    "parse_league_report",
]


class LeagueRun(Record):
    """One entrant with one seed."""

    name: Text = ""
    runs: tuple[Text, ...] = ()
    """What it took, the last one being the result; empty: nothing was searched or trained."""
    mean: Measured = None
    """None where a report task failed."""
    spent: SpentRecord = SpentRecord()
    seconds: Measured = None
    stop_reason: Text = ""
    """Why its budget ended it."""


class LeagueRow(Estimate):
    """One entrant, or the untouched model: what its seeds earned on average, task by task."""

    name: Text = ""
    what: Text = ""
    """How it was made."""
    settings: Text = ""
    """What is not its default."""
    gain: Estimate | None = None
    """Over the untouched model, paired by task; None for that model itself."""
    lead: Estimate | None = None
    """Over the best, paired by task; None for the best itself."""
    num_failed: int = 0
    """Report tasks that one of its seeds failed on: with any there is no mean."""
    runs: tuple[LeagueRun, ...] = ()

    @property
    def spent(self) -> SpentRecord:
        """Of a seed, on average."""
        num = max(1, len(self.runs))
        return SpentRecord(
            drawn_tokens=round(sum(run.spent.drawn_tokens for run in self.runs) / num),
            trained_tokens=round(sum(run.spent.trained_tokens for run in self.runs) / num),
        )

    @property
    def seconds(self) -> float | None:
        """Of a seed, on average; None where nothing was searched or trained."""
        known = [run.seconds for run in self.runs if run.seconds is not None]
        return sum(known) / len(known) if known else None


class LeaguePair(Record):
    """Two entrants, paired by task."""

    first: Text = ""
    second: Text = ""
    difference: Estimate = Estimate()
    """How much the first earned above the second."""


class LeftOut(Record):
    """An entrant, or one seed of it, that is not measured."""

    name: Text = ""
    reason: Text = ""
    is_failure: bool = False
    """Of one that applies, and failed."""


class LeagueReport(EvaluationReport):
    """The untouched model and every way to make it better, under one budget."""

    kind: Literal["league"] = "league"  # type: ignore[assignment]
    budget: Text = ""
    rows: tuple[LeagueRow, ...] = ()
    """The best first; those without a mean last."""
    pairs: tuple[LeaguePair, ...] = ()
    """Every two of the rows, in their order."""
    left_out: tuple[LeftOut, ...] = ()
    """Those that do not apply, and those that failed."""


def parse_league_report(document: Mapping[str, Json]) -> LeagueReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(LeagueReport, document, kind="a league")
