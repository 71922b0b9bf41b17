"""The page and the table of a labelling.

path.write_text(render_icm_page(report), encoding="utf-8")
for cells in icm_rows(report):
    table.add_row(*cells)       # under the names in COLUMNS
"""

from rookery.reports import IcmReport, IcmRow, TokensRecord
from rookery.ui import wording
from rookery.ui.page import render_template

__all__ = ["COLUMNS", "SENTENCES", "icm_rows", "render_icm_page", "verdict_words"]

COLUMNS = ("method", "labelled", "balance", "broken", "utility", "true", "95 % interval")
"""Of the table: what fits 80 characters."""

WEAK = 0.5
"""Below this strength most of what labels do to one another does not go along with the result."""

LISTED_ITEMS = 500
"""Rows of the folded list of items; labels.jsonl has them all."""

SENTENCES: dict[str, str] = {
    "coherent": "Coherent. Every item is labelled, no other labels that were found are as good, "
    "the others predict at least three labels of four, and they support one another more than "
    "labels of a random model.",
    "partial": "Not finished: some items have no label.",
    "collapsed": "Collapsed: nearly all items of a batch have the same label. These labels say "
    "nothing.",
    "inconsistent": "Inconsistent: labels break the constraints.",
    "opposite": "Opposite: what a label means in one batch is the opposite in another.",
    "inverse": "The inverse concept: the labels are mostly the opposite of the true ones.",
    "chance": "No better than chance against the true labels.",
    "ambiguous": "Ambiguous: other labels are as coherent as these.",
    "frustrated": "Frustrated: many items are predicted to have another label than they have.",
    "unsupported": "Unsupported: the labels are no more coherent than those of a random model.",
    "": "No result yet.",
}


def render_icm_page(report: IcmReport) -> str:
    """The page of a report; what is not there yet is named as missing."""
    unsure = sorted(report.items, key=lambda item: (item.margin is not None, item.margin or 0.0))
    return render_template(
        "icm.html.jinja",
        scripts=("frame.js", "icm.js", "draw.js"),
        report=report,
        sentence=SENTENCES.get(report.verdict, report.verdict),
        weak=WEAK,
        winner=next((row for row in report.rows if row.is_winner), None),
        balance=_balance,
        is_true_known=any(row.accuracy is not None for row in report.rows),
        unsure=unsure[:LISTED_ITEMS],
        saving=_saving(report.tokens),
        document=report.model_dump(mode="json", exclude={"items": {"__all__": {"text"}}}),
    )


def verdict_words(report: IcmReport) -> str:
    """`coherent, strength 0.94 of 1`; below half it is weak."""
    support = report.support
    if support is None or support.strength is None:
        return report.verdict
    weak = "weak, " if report.verdict == "coherent" and support.strength < WEAK else ""
    return f"{report.verdict}, {weak}strength {support.strength:.2f} of 1"


def icm_rows(report: IcmReport) -> list[tuple[str, ...]]:
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
        for row in report.rows
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
