"""The page and the table of a labelling: what `report.json` of an icm run holds, for people.

    path.write_text(render_icm_page(report), encoding="utf-8")
    for cells in icm_rows(report):
        table.add_row(*cells)       # under the names in COLUMNS

A run that was interrupted has fewer keys, so every field has an empty default.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from rookery.errors import RunError
from rookery.types import Json
from rookery.ui import wording
from rookery.ui.page import render_template
from rookery.ui.report import Measured, Record, Text

__all__ = ["COLUMNS", "IcmReport", "icm_rows", "parse_icm_report", "render_icm_page"]

COLUMNS = ("method", "labelled", "balance", "broken", "utility", "true", "95 % interval")
"""Of the table: what fits 80 characters."""

LISTED_ITEMS = 500
"""Rows of the folded list of items; labels.jsonl has them all."""

SENTENCES: dict[str, str] = {
    "coherent": "Coherent. Every item is labelled, no other labels that were found are as good, "
    "and hardly an item disagrees with the others.",
    "partial": "Not finished: some items have no label.",
    "collapsed": "Collapsed: nearly all items of a batch have the same label. These labels say "
    "nothing.",
    "inconsistent": "Inconsistent: labels break the constraints.",
    "opposite": "Opposite: what a label means in one batch is the opposite in another.",
    "inverse": "The inverse concept: the labels are mostly the opposite of the true ones.",
    "chance": "No better than chance against the true labels.",
    "ambiguous": "Ambiguous: other labels are as coherent as these.",
    "frustrated": "Frustrated: many items are predicted to have another label than they have.",
    "": "No result yet.",
}


class IcmRow(Record):
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
    accuracy: Measured = None
    """Share of labels that are the true ones, where these were given."""
    low: Measured = None
    high: Measured = None
    chance: Measured = None


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
    label: Text = ""
    margin: Measured = None


class TokensRecord(Record):
    """Prompt tokens of the search."""

    naive: int = 0
    requested: int = 0
    computed: int = 0
    baselines: int = 0


class IcmReport(Record):
    """Everything the page and the table show."""

    kind: Literal["icm"] = "icm"
    run: Text = ""
    model: Text = ""
    data: Text = ""
    seed: int | None = None
    labels: tuple[Text, ...] = ()
    num_items: int = 0
    num_labelled: int = 0
    verdict: Text = ""
    warnings: tuple[Text, ...] = ()
    utility: Measured = None
    num_frustrated: int = 0
    num_violated: int = 0
    balance: dict[Text, int] = Field(default_factory=dict)
    rows: tuple[IcmRow, ...] = ()
    chains: tuple[ChainRecord, ...] = ()
    items: tuple[ItemRecord, ...] = ()
    tokens: TokensRecord = TokensRecord()
    seconds: Measured = None


def parse_icm_report(document: Mapping[str, Json]) -> IcmReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    try:
        return IcmReport.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise RunError(
            f"The report cannot be shown: {where} is {first['input']!r:.80}, and "
            f"{first['msg'].lower()}. Give the report.json of an icm run as it was written."
        ) from None


def render_icm_page(report: Mapping[str, Json]) -> str:
    """The page of a report; what is not there yet is named as missing."""
    parsed = parse_icm_report(report)
    unsure = sorted(parsed.items, key=lambda item: (item.margin is not None, item.margin or 0.0))
    return render_template(
        "icm.html.jinja",
        scripts=("frame.js", "icm.js", "draw.js"),
        report=parsed,
        sentence=SENTENCES.get(parsed.verdict, parsed.verdict),
        winner=next((row for row in parsed.rows if row.is_winner), None),
        balance=_balance,
        is_true_known=any(row.accuracy is not None for row in parsed.rows),
        unsure=unsure[:LISTED_ITEMS],
        saving=_saving(parsed.tokens),
        document=parsed.model_dump(mode="json", exclude={"items": {"__all__": {"text"}}}),
    )


def icm_rows(report: Mapping[str, Json]) -> list[tuple[str, ...]]:
    """One tuple per row, one string per column of COLUMNS.

    `("icm", "16", "8 / 8", "0", "64.612", "1.000", "0.676 to 1.000")`
    """
    return [
        (
            row.name,
            wording.count(row.num_labelled),
            _balance(row),
            wording.count(row.num_violated),
            wording.score(row.utility),
            wording.score(row.accuracy),
            _interval(row),
        )
        for row in parse_icm_report(report).rows
    ]


def _balance(row: IcmRow) -> str:
    return " / ".join(str(count) for count in row.balance.values()) or wording.MISSING


def _interval(row: IcmRow) -> str:
    if row.low is None or row.high is None:
        return wording.MISSING
    return f"{wording.score(row.low)} to {wording.score(row.high)}"


def _saving(tokens: TokensRecord) -> str:
    """How many times fewer tokens: "13.4"; empty when nothing was computed."""
    return f"{tokens.naive / tokens.computed:.1f}" if tokens.computed else ""
