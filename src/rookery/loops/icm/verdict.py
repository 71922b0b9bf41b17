"""The quality of the labels: one verdict and the warnings behind it.

partial      some items have no label
collapsed    nearly all items of a batch have the same label, and no constraint demands it
inconsistent constraints are broken
opposite     labels of one batch predict the opposite of another batch's labels
inverse      the labels are the opposite of the true labels
chance       the labels agree with the true labels no better than chance
ambiguous    other consistent labels have at least as high a utility
frustrated   many items are predicted to have another label than their own
unsupported  the labels support one another no more than those of a random model would, and no true
             labels show that they are better than chance
coherent     none of these; `support.strength` says how coherent

`measure_support` compares the labels with those of random models:

    support = await measure_support(batch, questions=questions)
    support.gain, support.strength, support.p

A search finds labels that predict one another in any model, even in one that responds to shown
labels at random, because it can choose among many labellings. So each item is read given the found
labels of the other questions, and given random labels that break no constraint. `gain` is how far
the found labels raise the log-odds of a label, in standard deviations of the effect of random ones.

A random model has the same number of questions, answers that are as sure by themselves, and
normally distributed couplings. These are symmetric, which helps labels agree most. `p` is the share
of such models whose best labels gain as much. If a model is sure of items by themselves, the search
has less choice, and a smaller gain shows support.

If all items follow one concept alike, G questions gain sqrt(G - 1). `strength` is the gain divided
by that, at most 1: then all mutual influence of the labels agrees with the found ones.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rookery.loops.icm.chain import ItemBatch
from rookery.loops.icm.objective import log_odds
from rookery.runtime.concurrency import together
from rookery.search.annealing import AnnealingConfig, start_labels
from rookery.search.labelling import UNLABELLED, Labels, labelled_items
from rookery.search.statistics import Interval, proportion
from rookery.seeding import stream, stream_seed

__all__ = [
    "MAX_P",
    "NUM_CONTEXTS",
    "Agreement",
    "Evidence",
    "MajorityLabel",
    "Support",
    "Verdict",
    "agree",
    "join_supports",
    "judge",
    "measure_support",
    "random_gains",
]


NUM_CONTEXTS = 16
"""Random labellings under which each item is read, at a few percent of a search's cost."""

NUM_MODELS = 199
"""Number of random models to compare with."""

NUM_STARTS = 8
"""Number of searches in each random model."""

MAX_QUESTIONS = 32
"""Maximum questions of a random model: more hardly raise its gain, unlike that of a concept."""

SURENESS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Possible certainty of random models' answers alone. Measured values are rounded down."""

MAX_P = 0.01
"""With a larger p the labels may be those of a random model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The mutual support of labels."""

    gain: float
    """Gain in standard deviations of the effect of random labels; 0 if those have no effect."""
    strength: float
    """Gain relative to a perfect concept, 0 to 1."""
    random_gains: tuple[float, ...]
    """Gains of the best labels of random models, ascending."""
    num_items: int

    @property
    def p(self) -> float:
        above = sum(gain >= self.gain for gain in self.random_gains)
        return (1 + above) / (1 + len(self.random_gains))

    @property
    def random_gain(self) -> float:
        """Median gain of the best labels of random models."""
        return self.random_gains[len(self.random_gains) // 2]


async def measure_support(batch: ItemBatch, *, questions: Sequence[str]) -> Support | None:
    """Measure the support of a batch's best labels. None with fewer than two questions, or if no
    item is answered.

    `questions` names the question of each item. Reads are stored and never repeated.
    """
    labels = batch.best.labels
    items = labelled_items(labels)
    num_questions = len({questions[item] for item in items})
    if num_questions < 2:
        return None
    drawn = [_random_labels(batch, number) for number in range(NUM_CONTEXTS)]

    async def read(shown: Labels) -> list[float]:
        contexts = [(_hide_question(shown, labels, questions, item), item) for item in items]
        reads = await batch.scorer.score(contexts)
        return [
            math.nan if read is None else log_odds(read, labels[item])
            for read, item in zip(reads, items, strict=True)
        ]

    # One call per labelling, so that an engine finishes one before the next.
    odds = np.array(await together(map(read, (labels, *drawn))))
    is_known = np.isfinite(odds).all(axis=0)
    if not is_known.any():
        return None
    odds = odds[:, is_known]
    context_labels = np.array([labels[item] for item in items])[is_known]
    gain = float(_gain(odds[0], odds[1:]))
    return Support(
        gain=gain,
        strength=_strength(gain, num_questions),
        random_gains=random_gains(
            num_questions, batch.problem.num_labels, _sureness(odds[1:], context_labels)
        ),
        num_items=odds.shape[1],
    )


def join_supports(supports: Sequence[Support]) -> Support | None:
    """Average the supports by number of items. None if there are none."""
    total = sum(support.num_items for support in supports)
    if not total:
        return None
    parts = [support.num_items / total for support in supports]
    gains = np.array([support.random_gains for support in supports])
    return Support(
        gain=math.fsum(part * support.gain for part, support in zip(parts, supports, strict=True)),
        strength=math.fsum(
            part * support.strength for part, support in zip(parts, supports, strict=True)
        ),
        random_gains=tuple((np.array(parts) @ gains).tolist()),
        num_items=total,
    )


def _random_labels(batch: ItemBatch, number: int) -> Labels:
    problem = batch.problem
    return start_labels(
        problem.constraints,
        num_items=problem.num_items,
        num_labels=problem.num_labels,
        config=AnnealingConfig(num_start=problem.num_items),
        seed=stream_seed(batch.seed, "support", number),
    )


def _hide_question(
    shown: Labels, labels: Labels, questions: Sequence[str], item: int
) -> tuple[int, ...]:
    """Return the shown labels of labelled items of other questions."""
    return tuple(
        UNLABELLED if held == UNLABELLED or question == questions[item] else label
        for label, held, question in zip(shown, labels, questions, strict=True)
    )


def _sureness(odds: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return how sure answers are regardless of shown labels, in standard deviations of their
    effect.

    A preference shared by all items of a label is a habit and does not count. Rounded down.
    """
    means = odds.mean(axis=0)
    signs = np.where(labels == labels.max(), 1.0, -1.0)
    means = means - signs * (signs * means).mean()
    noise = odds.var(axis=0, ddof=1).mean()
    squares = max(0.0, float((means**2).mean() - noise / len(odds)))
    return max((step for step in SURENESS if step**2 * noise <= squares), default=0.0)


def _strength(gain: float, num_questions: int) -> float:
    return min(1.0, max(0.0, gain / math.sqrt(num_questions - 1)))


def _gain(behind: NDArray[np.float64], random: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compare log-odds [..., item] of found labels with [context, ..., item] of random labels."""
    spread = np.sqrt(random.var(axis=0, ddof=1).mean(axis=-1))
    raised = (behind - random.mean(axis=0)).mean(axis=-1)
    is_flat = spread <= 1e-9 * (1.0 + np.abs(behind).max(axis=-1))
    return np.where(is_flat, 0.0, raised / np.where(is_flat, 1.0, spread))


@lru_cache(maxsize=256)
def random_gains(num_questions: int, num_labels: int, sureness: float = 0.0) -> tuple[float, ...]:
    """Return the gains of the best labels of random models, ascending."""
    size = min(num_questions, MAX_QUESTIONS)
    rng = stream(0, "random models", size, num_labels)
    shape = (NUM_MODELS, size, num_labels)
    couplings = rng.normal(size=(*shape, size, num_labels))
    couplings += couplings.transpose(0, 3, 4, 1, 2)
    for axis in (2, 4):
        couplings -= couplings.mean(axis=axis, keepdims=True)
    couplings[:, range(size), :, range(size), :] = 0.0
    balanced = np.tile(np.arange(size) % num_labels, (NUM_MODELS, NUM_CONTEXTS, 1))
    drawn = rng.permuted(balanced, axis=-1)
    behind = _fields(couplings, drawn)
    alone = rng.normal(size=shape)
    alone -= alone.mean(axis=-1, keepdims=True)
    alone *= sureness * behind.std() / alone.std()
    labels = rng.integers(num_labels, size=(NUM_MODELS, NUM_STARTS, size))
    labels = _ascend(couplings, alone, labels)
    fields = _fields(couplings, labels)
    label_fields = np.take_along_axis(fields, labels[..., None], axis=-1)[..., 0]
    total = np.take_along_axis(fields + alone[:, None], labels[..., None], axis=-1)[..., 0]
    models, best = np.arange(NUM_MODELS), total.mean(axis=-1).argmax(axis=-1)
    best_labels = labels[models, best]
    random = np.take_along_axis(behind, best_labels[:, None, :, None], axis=-1)[..., 0]
    return tuple(np.sort(_gain(label_fields[models, best], random.swapaxes(0, 1))).tolist())


def _fields(couplings: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the effect of each labelling on each label: [model, labelling, question, label]."""
    is_label = np.eye(couplings.shape[-1])[labels]
    fields: NDArray[np.float64] = np.einsum("mialb,mslb->msia", couplings, is_label, optimize=True)
    return fields


def _ascend(
    couplings: NDArray[np.float64], alone: NDArray[np.float64], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Change one label after another while that raises the utility."""
    fields = _fields(couplings, labels)
    models = np.arange(len(couplings))[:, None]
    while True:
        before = labels.copy()
        for place in range(labels.shape[-1]):
            # A label changes its own log-odds, and those of the others by as much.
            best = (alone[:, None, place] + 2 * fields[:, :, place]).argmax(axis=-1)
            columns = couplings[:, :, :, place]
            fields += columns[models, :, :, best] - columns[models, :, :, labels[:, :, place]]
            labels[:, :, place] = best
        if (labels == before).all():
            return labels


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
"""Below this, the model mostly expects something other than a label."""

COLLAPSED_SHARE = 0.95
"""From this share of one label on, too few others are left to form a concept."""

MANY_FRUSTRATED = 0.25
"""Above this share of frustrated items, labels predict one another hardly better than a coin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of labels with others, and its value by chance."""

    interval: Interval
    chance: float
    num_items: int

    @property
    def is_chance(self) -> bool:
        return self.interval.low <= self.chance <= self.interval.high

    @property
    def is_below_chance(self) -> bool:
        """True even with too few items to be sure. The tolerance ignores rounding errors."""
        return self.interval.estimate < self.chance - 1e-9

    @property
    def is_inverse(self) -> bool:
        return self.interval.high < self.chance


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityLabel:
    """The most frequent label of one batch."""

    batch: int
    label: int
    num_items: int
    """Number of items with this label."""
    num_labelled: int
    share: float
    """Share of this label, without the occurrences that constraints enforce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The basis of a verdict."""

    labels: Labels
    majorities: Sequence[MajorityLabel]
    """Most frequent label of each batch."""
    transfers: Mapping[int, Agreement]
    """Agreement of every later batch's labels with those that the first batch predicts."""
    names: Sequence[str]
    num_frustrated: int
    num_violated: int
    mass: float
    gold: Agreement | None
    rivals: Sequence[tuple[float, float]]
    """(utility lost, share of equal labels) of other complete and consistent labellings."""
    support: Support | None = None
    """None if it could not be measured."""
    errors: Sequence[str] = ()
    """Errors of contexts that the engine could not answer."""


def agree(
    labels: Mapping[int, int], others: Mapping[int, int], *, clusters: Sequence[Hashable]
) -> Agreement | None:
    """Compute the agreement on items that both label. None if there are none.

    `clusters` names each item's question, because items of one question are not independent: if
    exactly one of a pair is true, the second label adds no information.
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
    """Return the verdict, and a warning for every sign that the labels are wrong."""
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
    against = {
        batch: transfer
        for batch, transfer in evidence.transfers.items()
        if transfer.is_below_chance
    }
    if against:
        words = "; ".join(f"batch {batch}: {_words(a)}" for batch, a in against.items())
        surely = "have" if any(transfer.is_inverse for transfer in against.values()) else "may have"
        warnings["opposite"] = (
            f"Batches {surely} opposite labels. After labels of batch 0 the model expects others "
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
            "The labels are no more coherent than in a random model. They raise one "
            f"another's log-odds by {support.gain:.1f} standard deviations of what random labels "
            f"do, the best labels of a random model by {support.random_gain:.1f} (p "
            f"{support.p:.3f}). They may be what the model says of each item by itself, or chance: "
            "add items, or check some labels by hand."
        )
