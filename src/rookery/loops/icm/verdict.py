"""What the labels are worth: one verdict and the sentences behind it.

partial      some items have no label
collapsed    nearly all items of a batch have the same label, and no constraint asks for it
inconsistent constraints are broken
opposite     labels of one batch predict the opposite of those of another
inverse      true labels were given and the labels are their opposite
chance       true labels were given and the labels agree with them no better than chance
ambiguous    other consistent labels have as high a utility
frustrated   many items are predicted to have another label than they have
unsupported  the labels support one another no more than those of a random model would, and no true
             labels show that they are better than chance
coherent     none of these; `support.strength` says how coherent
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rookery.loops.icm.support import MAX_P, Support
from rookery.search.labelling import UNLABELLED, Labels
from rookery.search.statistics import Interval, proportion

__all__ = ["Agreement", "Evidence", "MajorityLabel", "Verdict", "agree", "judge"]

Verdict = Literal[
    "partial",
    "collapsed",
    "inconsistent",
    "opposite",
    "inverse",
    "chance",
    "ambiguous",
    "frustrated",
    "unsupported",
    "coherent",
]

LOW_MASS = 0.5
"""Below this the model mostly expects something else than a label."""

COLLAPSED_SHARE = 0.95
"""From this share of one label on, the others are too few to be a concept."""

MANY_FRUSTRATED = 0.25
"""Above this share of frustrated items the labels predict one another hardly better than a coin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far labels agree with others, and how far they would by chance."""

    interval: Interval
    chance: float
    num_items: int

    @property
    def is_chance(self) -> bool:
        return self.interval.low <= self.chance <= self.interval.high

    @property
    def is_below_chance(self) -> bool:
        """Also where there are too few items to be sure; not for a difference in the last bits."""
        return self.interval.estimate < self.chance - 1e-9

    @property
    def is_inverse(self) -> bool:
        return self.interval.high < self.chance


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityLabel:
    """The label that most items of one batch carry."""

    batch: int
    label: int
    num_items: int
    """Those that carry it."""
    num_labelled: int
    share: float
    """Of the labels that no constraint gives away, those that are this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a verdict rests on."""

    labels: Labels
    majorities: Sequence[MajorityLabel]
    """One for each batch."""
    transfers: Mapping[int, Agreement]
    """Of each batch but the first: its labels with those that the first one's predict."""
    names: Sequence[str]
    num_frustrated: int
    num_violated: int
    mass: float
    gold: Agreement | None
    rivals: Sequence[tuple[float, float]]
    """(utility lost against the result, share of labels in common) of complete and consistent
    labellings that other starts ended with or that need no search."""
    support: Support | None = None
    """None where it could not be measured."""
    errors: Sequence[str] = ()
    """Of the contexts that the engine could not answer."""


def agree(
    labels: Mapping[int, int], others: Mapping[int, int], *, clusters: Sequence[Hashable]
) -> Agreement | None:
    """Agreement on the items that both label; None when there are none.

    `clusters` names the question of every item: items of one question are not independent. Of a
    pair of which exactly one is true, the second label adds no information.
    """
    both = sorted(labels.keys() & others.keys())
    if not both:
        return None
    ours, theirs = Counter(labels[i] for i in both), Counter(others[i] for i in both)
    return Agreement(
        interval=proportion(
            [labels[i] == others[i] for i in both], clusters=[clusters[i] for i in both]
        ),
        chance=sum(ours[label] * theirs[label] for label in ours) / len(both) ** 2,
        num_items=len(both),
    )


def judge(evidence: Evidence) -> tuple[Verdict, list[str]]:
    """The verdict, and a warning for every sign that the labels are wrong."""
    warning_by_verdict: dict[Verdict, str] = {}
    _judge_form(evidence, warning_by_verdict)
    _judge_transfers(evidence, warning_by_verdict)
    _judge_gold(evidence, warning_by_verdict)
    _judge_rivals(evidence, warning_by_verdict)
    _judge_support(evidence, warning_by_verdict)
    warnings = list(warning_by_verdict.values())
    if evidence.mass < LOW_MASS:
        warnings.append(
            f"The model gives the labels {evidence.mass:.0%} of its probability: it expects "
            "something else there. Check the prompt and the labels."
        )
    for batch, agreement in evidence.transfers.items():
        if "opposite" not in warning_by_verdict and agreement.is_chance:
            warnings.append(
                f"Labels of batch 0 hardly predict those of batch {batch}: {_words(agreement)}. "
                "They may be of another concept."
            )
    if evidence.errors:
        warnings.append(
            f"The engine could not answer {len(evidence.errors)} contexts, and labels that need "
            f"them were not tried. The first says: {evidence.errors[0]}"
        )
    return next(iter(warning_by_verdict), "coherent"), warnings


def _judge_form(evidence: Evidence, warnings: dict[Verdict, str]) -> None:
    num_items = len(evidence.labels)
    num_labelled = num_items - evidence.labels.count(UNLABELLED)
    if num_labelled < num_items:
        warnings["partial"] = (
            f"Only {num_labelled} of {num_items} items are labelled: adding the others made the "
            "labels predict one another worse, or the iterations were used up. This is no success."
        )
    collapsed = [majority for majority in evidence.majorities if majority.share >= COLLAPSED_SHARE]
    if collapsed:
        warnings["collapsed"] = (
            f"{'; '.join(_majority_words(majority, evidence) for majority in collapsed)}. "
            "One label for everything predicts itself best: declare constraints between items, or "
            "set objective.calibrate. If the items really are so uneven, check some by hand."
        )
    if evidence.num_violated:
        warnings["inconsistent"] = f"{evidence.num_violated} pairs of labels break a constraint."


def _majority_words(majority: MajorityLabel, evidence: Evidence) -> str:
    name = evidence.names[majority.label]
    where = f" of batch {majority.batch}" if len(evidence.majorities) > 1 else ""
    if majority.num_items == majority.num_labelled:
        return f"All labels{where} are {name}"
    return f"{majority.num_items} of {majority.num_labelled} labels{where} are {name}"


def _judge_transfers(evidence: Evidence, warnings: dict[Verdict, str]) -> None:
    against = {batch: own for batch, own in evidence.transfers.items() if own.is_below_chance}
    if against:
        words = "; ".join(f"batch {batch}: {_words(a)}" for batch, a in against.items())
        surely = "have" if any(own.is_inverse for own in against.values()) else "may have"
        warnings["opposite"] = (
            f"Batches {surely} opposite labels. Behind labels of batch 0 the model expects others "
            f"than there are ({words}). Label all items in one batch, or compare a few of these "
            "batches' labels by hand and turn them around if they are."
        )


def _words(agreement: Agreement) -> str:
    interval = agreement.interval
    return (
        f"{interval.estimate:.0%} of {agreement.num_items} labels are as expected, 95 % interval "
        f"{interval.low:.0%} to {interval.high:.0%}, chance {agreement.chance:.0%}"
    )


def _judge_gold(evidence: Evidence, warnings: dict[Verdict, str]) -> None:
    gold = evidence.gold
    if gold is None:
        return
    words = (
        f"the labels agree with the true ones on {gold.interval.estimate:.0%} of "
        f"{gold.num_items} items (95 % interval {gold.interval.low:.0%} to "
        f"{gold.interval.high:.0%}, chance {gold.chance:.0%})"
    )
    if gold.is_inverse:
        warnings["inverse"] = (
            f"The inverse concept: {words}. The items were told apart, and the labels swapped."
        )
    elif gold.is_chance:
        warnings["chance"] = f"No better than chance: {words}."


def _judge_rivals(evidence: Evidence, warnings: dict[Verdict, str]) -> None:
    near = [same for lost, same in evidence.rivals if lost <= 0 and same < 1]
    if near:
        warnings["ambiguous"] = (
            f"Other labels, of another start or without a search, are at least as coherent with "
            f"only {min(near):.0%} of them in common: the items do not decide. These may be chance "
            "labels or the inverse concept."
        )
    share = evidence.num_frustrated / max(1, len(evidence.labels))
    if share > MANY_FRUSTRATED:
        warnings["frustrated"] = (
            f"{evidence.num_frustrated} of {len(evidence.labels)} items are predicted to have "
            "another label than they have: the labels look like chance to the model itself."
        )


def _judge_support(evidence: Evidence, warnings: dict[Verdict, str]) -> None:
    support, gold = evidence.support, evidence.gold
    if gold is not None and gold.interval.low > gold.chance:
        return  # the true labels show that these are not chance
    if support is None:
        warnings["unsupported"] = (
            "Whether the labels support one another could not be measured: it takes two questions "
            "and an engine that answers."
        )
    elif support.p > MAX_P:
        warnings["unsupported"] = (
            "The labels are no more coherent than those of a random model may be. They raise one "
            f"another's log-odds by {support.gain:.1f} standard deviations of what random labels "
            f"do, the best labels of a random model by {support.random_gain:.1f} (p "
            f"{support.p:.3f}). They may be what the model says of each item by itself, or chance: "
            "add items, or check some labels by hand."
        )
