"""The report of a league: what `report.json` of a league run holds.

report = parse_league_report(json.loads(path.read_text()))
report.rows[0].name, report.rows[0].gain.low     # the best, and its gain's lower bound
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
    """Its runs, the last one with the result; empty if nothing was searched or trained."""
    mean: Measured = None
    """None if a report task failed."""
    spent: SpentRecord = SpentRecord()
    seconds: Measured = None
    stop_reason: Text = ""
    """Why its budget ended it, if it did."""


class LeagueRow(Estimate):
    """One entrant, or the untouched model: mean reward over its seeds, task by task."""

    name: Text = ""
    what: Text = ""
    """Description of the entrant."""
    settings: Text = ""
    """Settings that differ from the defaults."""
    gain: Estimate | None = None
    """Gain over the untouched model, paired by task; None for that model."""
    lead: Estimate | None = None
    """Difference to the best row, paired by task; None for the best."""
    num_failed: int = 0
    """Report tasks that one of its seeds failed on; above 0 there is no mean."""
    runs: tuple[LeagueRun, ...] = ()

    @property
    def spent(self) -> SpentRecord:
        """Mean spending of a seed."""
        num = max(1, len(self.runs))
        return SpentRecord(
            drawn_tokens=round(sum(run.spent.drawn_tokens for run in self.runs) / num),
            trained_tokens=round(sum(run.spent.trained_tokens for run in self.runs) / num),
        )

    @property
    def seconds(self) -> float | None:
        """Mean seconds of a seed; None if nothing was searched or trained."""
        known = [run.seconds for run in self.runs if run.seconds is not None]
        return sum(known) / len(known) if known else None


class LeaguePair(Record):
    """Two entrants, paired by task."""

    first: Text = ""
    second: Text = ""
    difference: Estimate = Estimate()
    """Reward of the first minus that of the second."""


class LeftOut(Record):
    """An entrant, or one seed of it, that is not measured."""

    name: Text = ""
    reason: Text = ""
    is_failure: bool = False
    """True for a failure, False if the entrant does not apply."""


class LeagueReport(EvaluationReport):
    """The untouched model and every way to make it better, under one budget."""

    kind: Literal["league"] = "league"  # type: ignore[assignment]
    budget: Text = ""
    rows: tuple[LeagueRow, ...] = ()
    """Best first; rows without a mean last."""
    pairs: tuple[LeaguePair, ...] = ()
    """All pairs of rows, in their order."""
    left_out: tuple[LeftOut, ...] = ()
    """Entrants that do not apply, or failed."""


def parse_league_report(document: Mapping[str, Json]) -> LeagueReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(LeagueReport, document, kind="a league")
