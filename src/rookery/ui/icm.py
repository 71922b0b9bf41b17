"""What is said of a labelling, and its table.

for cells in icm_rows(report):
    table.add_row(*cells)       # under the names in COLUMNS
"""

from rookery.reports import IcmReport, IcmRow
from rookery.ui import wording

__all__ = [
    "COLUMNS",
    "SENTENCES",
    "WEAK",
    "icm_contexts",
    "icm_costs",
    "icm_rows",
    "verdict_words",
]

COLUMNS = ("method", "labelled", "balance", "broken", "utility", "true", "95 % interval")
"""Of the table: what fits 80 characters."""

WEAK = 0.5
"""Below this strength most of what labels do to one another does not go along with the result."""

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


def icm_contexts(report: IcmReport) -> list[str]:
    """What a reader of the labels must know."""
    support = report.support
    said = []
    if support is not None and support.gain is not None and support.random_gain is not None:
        own, random = (round(gain, 1) + 0.0 for gain in (support.gain, support.random_gain))
        said.append(
            f"The labels raise one another's log-odds by {own:.1f} standard deviations of what "
            f"random labels do; the best labels of a random model reach {random:.1f}."
        )
    unknown = all(row.accuracy is None for row in report.rows)
    missing = " No true labels were given to compare with." if unknown else ""
    return [
        *said,
        f"Coherence is not truth: labels can predict one another well and be wrong.{missing}",
    ]


def icm_costs(report: IcmReport) -> list[str]:
    """["100 tokens for the search", "50 for the comparison", "12.0 s"]."""
    tokens = report.tokens
    if not tokens.computed:
        return []
    costs = [
        f"{wording.plural(tokens.computed, 'token')} for the search",
        f"{wording.count(tokens.baselines)} for the comparison",
    ]
    return [*costs, wording.duration(report.seconds)] if report.seconds else costs


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
