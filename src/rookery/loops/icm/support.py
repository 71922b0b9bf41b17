"""Whether labels support one another more than those of a random model would.

    support = await measure_support(batch, questions=questions)
    support.gain, support.strength, support.p

A search finds labels that predict one another in any model, also in one whose answers depend on the
labels it is shown at random: it has many labellings to choose from. So the labels are compared with
random ones, which break no constraint. Each item is read behind them, its own question labelled as
the search did. `gain` is how far the found labels of all other questions raise the log-odds of a
label, in standard deviations of what random ones do. A random model of as many questions has
couplings drawn from a normal distribution, equal in both directions, which lets labels agree best;
`p` is the part of such models whose best labels gain as much.

With one concept, that each item follows alike, G questions gain sqrt(G - 1). `strength` is the gain
in parts of that: 1 when all that labels do to one another goes along with the found ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rookery.loops.icm.batch import Batch
from rookery.loops.icm.objective import log_odds
from rookery.search.annealing import AnnealingConfig, start_labels
from rookery.search.labelling import UNLABELLED, Labels, labelled_items
from rookery.seeding import stream, stream_seed

__all__ = ["MAX_P", "Support", "join_supports", "measure_support", "random_gains"]

NUM_CONTEXTS = 16
"""Random labellings behind which every item is read: a few hundredths of what a search reads."""

NUM_MODELS = 199
"""Random models to compare with."""

NUM_STARTS = 8
"""Searches in each of them."""

MAX_QUESTIONS = 32
"""Of a random model: the gain hardly grows with more, and that of a concept as their root."""

MAX_P = 0.01
"""Above this the labels may be those of a random model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """How far labels support one another."""

    gain: float
    """In standard deviations of what random labels do; 0 where they do nothing."""
    strength: float
    """0 to 1."""
    random_gains: tuple[float, ...]
    """Of the best labels of random models."""
    num_items: int

    @property
    def p(self) -> float:
        above = sum(gain >= self.gain for gain in self.random_gains)
        return (1 + above) / (1 + len(self.random_gains))

    @property
    def random_gain(self) -> float:
        """Of the best labels of a typical random model."""
        return self.random_gains[len(self.random_gains) // 2]


async def measure_support(batch: Batch, *, questions: Sequence[str]) -> Support | None:
    """Of the best labels of a batch; None when there are not two questions, or no item is answered.

    `questions` names the question of each item. The reads are asked for once and stored.
    """
    labels = batch.best.labels
    items = labelled_items(labels)
    num_questions = len({questions[item] for item in items})
    if num_questions < 2:
        return None
    drawn = [_random_labels(batch, number) for number in range(NUM_CONTEXTS)]
    shown = [
        (tuple(_mixed(labels, other, questions, item)), item) for other in drawn for item in items
    ]
    reads = await batch.scorer.score([*((labels, item) for item in items), *shown])
    odds = np.array(
        [
            math.nan if read is None else log_odds(read, labels[items[place % len(items)]])
            for place, read in enumerate(reads)
        ]
    ).reshape(1 + NUM_CONTEXTS, len(items))
    odds = odds[:, np.isfinite(odds).all(axis=0)]
    if not odds.size:
        return None
    gain = float(_gain(odds[0], odds[1:]))
    return Support(
        gain=gain,
        strength=_strength(gain, num_questions),
        random_gains=random_gains(num_questions, batch.problem.num_labels),
        num_items=odds.shape[1],
    )


def join_supports(supports: Sequence[Support]) -> Support | None:
    """Of all batches: the means over their items; None when there is none."""
    total = sum(own.num_items for own in supports)
    if not total:
        return None
    parts = [own.num_items / total for own in supports]
    gains = np.array([own.random_gains for own in supports])
    return Support(
        gain=math.fsum(part * own.gain for part, own in zip(parts, supports, strict=True)),
        strength=math.fsum(part * own.strength for part, own in zip(parts, supports, strict=True)),
        random_gains=tuple((np.array(parts) @ gains).tolist()),
        num_items=total,
    )


def _random_labels(batch: Batch, number: int) -> Labels:
    problem = batch.problem
    return start_labels(
        problem.constraints,
        num_items=problem.num_items,
        num_labels=problem.num_labels,
        config=AnnealingConfig(num_start=problem.num_items),
        seed=stream_seed(batch.seed, "support", number),
    )


def _mixed(labels: Labels, others: Labels, questions: Sequence[str], item: int) -> list[int]:
    """The other labels, but those found for the item's own question; no further items."""
    return [
        own if own == UNLABELLED or question == questions[item] else other
        for own, other, question in zip(labels, others, questions, strict=True)
    ]


def _strength(gain: float, num_questions: int) -> float:
    return min(1.0, max(0.0, gain / math.sqrt(num_questions - 1)))


def _gain(found: NDArray[np.float64], random: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-odds [..., item] behind the found labels, [context, ..., item] behind random ones."""
    spread = np.sqrt(random.var(axis=0, ddof=1).mean(axis=-1))
    raised = (found - random.mean(axis=0)).mean(axis=-1)
    is_flat = spread <= 1e-9 * (1.0 + np.abs(found).max(axis=-1))
    return np.where(is_flat, 0.0, raised / np.where(is_flat, 1.0, spread))


@lru_cache(maxsize=256)
def random_gains(num_questions: int, num_labels: int) -> tuple[float, ...]:
    """What the best labels of random models gain, ascending."""
    size = min(num_questions, MAX_QUESTIONS)
    rng = stream(0, "random models", size, num_labels)
    shape = (NUM_MODELS, size, num_labels, size, num_labels)
    couplings = rng.normal(size=shape)
    couplings += couplings.transpose(0, 3, 4, 1, 2)
    for axis in (2, 4):
        couplings -= couplings.mean(axis=axis, keepdims=True)
    couplings[:, range(size), :, range(size), :] = 0.0
    labels = _ascend(couplings, rng.integers(num_labels, size=(NUM_MODELS, NUM_STARTS, size)))
    balanced = np.tile(np.arange(size) % num_labels, (NUM_MODELS, NUM_CONTEXTS, 1))
    drawn = rng.permuted(balanced, axis=-1)
    fields, behind = _fields(couplings, labels), _fields(couplings, drawn)
    own = np.take_along_axis(fields, labels[..., None], axis=-1)[..., 0]
    best = own.mean(axis=-1).argmax(axis=-1)
    models = np.arange(NUM_MODELS)
    found = labels[models, best]
    random = np.take_along_axis(behind, found[:, None, :, None], axis=-1)[..., 0]
    return tuple(np.sort(_gain(own[models, best], random.swapaxes(0, 1))).tolist())


def _fields(couplings: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """[model, labelling, question, label]: what each labelling adds to each label."""
    is_label = np.eye(couplings.shape[-1])[labels]
    fields: NDArray[np.float64] = np.einsum("mialb,mslb->msia", couplings, is_label, optimize=True)
    return fields


def _ascend(couplings: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each labelling with one label changed after the other, while that adds to the sum."""
    fields = _fields(couplings, labels)
    models = np.arange(len(couplings))[:, None]
    while True:
        before = labels.copy()
        for place in range(labels.shape[-1]):
            best = fields[:, :, place].argmax(axis=-1)
            columns = couplings[:, :, :, place]
            fields += columns[models, :, :, best] - columns[models, :, :, labels[:, :, place]]
            labels[:, :, place] = best
        if (labels == before).all():
            return labels
