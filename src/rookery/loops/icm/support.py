"""Whether labels support one another more than those of a random model would.

    support = await measure_support(batch, questions=questions)
    support.gain, support.strength, support.p

A search finds labels that predict one another in any model, also in one whose answers depend on the
labels it is shown at random: it has many labellings to choose from. So each item is read behind the
found labels of the other questions, and behind random ones, which break no constraint. `gain` is
how far the found ones raise the log-odds of a label, in standard deviations of what random ones do.
A random model has as many questions, answers of its own that are as sure, and couplings drawn from
a normal distribution, equal in both directions, which lets labels agree best; `p` is the part of
such models whose best labels gain as much. Where a model is sure of items by themselves, the search
chooses less, and a smaller gain shows that labels support one another.

With one concept, that each item follows alike, G questions gain sqrt(G - 1). `strength` is the gain
in parts of that: 1 when all that labels do to one another goes along with the found ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rookery.loops.icm.chain import Batch
from rookery.loops.icm.objective import log_odds
from rookery.search.annealing import AnnealingConfig, start_labels
from rookery.search.labelling import UNLABELLED, Labels, labelled_items
from rookery.seeding import stream, stream_seed

__all__ = ["MAX_P", "NUM_CONTEXTS", "Support", "join_supports", "measure_support", "random_gains"]

NUM_CONTEXTS = 16
"""Random labellings behind which every item is read: a few hundredths of what a search reads."""

NUM_MODELS = 199
"""Random models to compare with."""

NUM_STARTS = 8
"""Searches in each of them."""

MAX_QUESTIONS = 32
"""Of a random model: the gain hardly grows with more, and that of a concept as their root."""

SURENESS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Of the answers of random models by themselves: the least of the five that they may have."""

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
    contexts = [
        (_of_others(shown, labels, questions, item), item)
        for shown in (labels, *drawn)
        for item in items
    ]
    reads = await batch.scorer.score(contexts)
    own = [labels[item] for _, item in contexts]
    odds = np.array(
        [
            math.nan if read is None else log_odds(read, label)
            for read, label in zip(reads, own, strict=True)
        ]
    ).reshape(1 + NUM_CONTEXTS, len(items))
    is_known = np.isfinite(odds).all(axis=0)
    if not is_known.any():
        return None
    odds, own = odds[:, is_known], np.array(own[: len(items)])[is_known]
    gain = float(_gain(odds[0], odds[1:]))
    return Support(
        gain=gain,
        strength=_strength(gain, num_questions),
        random_gains=random_gains(
            num_questions, batch.problem.num_labels, _sureness(odds[1:], own)
        ),
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


def _of_others(
    shown: Labels, found: Labels, questions: Sequence[str], item: int
) -> tuple[int, ...]:
    """What is shown of the other questions' items that have a label."""
    return tuple(
        UNLABELLED if own == UNLABELLED or question == questions[item] else label
        for label, own, question in zip(shown, found, questions, strict=True)
    )


def _sureness(odds: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """How sure answers are whatever labels are shown, in standard deviations of what those do.

    What is said of all items of a label alike is a habit and does not count. Rounded down.
    """
    means = odds.mean(axis=0)
    signs = np.where(labels == labels.max(), 1.0, -1.0)
    means = means - signs * (signs * means).mean()
    noise = odds.var(axis=0, ddof=1).mean()
    squares = max(0.0, float((means**2).mean() - noise / len(odds)))
    return max((step for step in SURENESS if step**2 * noise <= squares), default=0.0)


def _strength(gain: float, num_questions: int) -> float:
    return min(1.0, max(0.0, gain / math.sqrt(num_questions - 1)))


def _gain(found: NDArray[np.float64], random: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-odds [..., item] behind the found labels, [context, ..., item] behind random ones."""
    spread = np.sqrt(random.var(axis=0, ddof=1).mean(axis=-1))
    raised = (found - random.mean(axis=0)).mean(axis=-1)
    is_flat = spread <= 1e-9 * (1.0 + np.abs(found).max(axis=-1))
    return np.where(is_flat, 0.0, raised / np.where(is_flat, 1.0, spread))


@lru_cache(maxsize=256)
def random_gains(num_questions: int, num_labels: int, sureness: float = 0.0) -> tuple[float, ...]:
    """What the best labels of random models gain, ascending."""
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
    own = np.take_along_axis(fields, labels[..., None], axis=-1)[..., 0]
    total = np.take_along_axis(fields + alone[:, None], labels[..., None], axis=-1)[..., 0]
    models, best = np.arange(NUM_MODELS), total.mean(axis=-1).argmax(axis=-1)
    found = labels[models, best]
    random = np.take_along_axis(behind, found[:, None, :, None], axis=-1)[..., 0]
    return tuple(np.sort(_gain(own[models, best], random.swapaxes(0, 1))).tolist())


def _fields(couplings: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """[model, labelling, question, label]: what each labelling adds to each label."""
    is_label = np.eye(couplings.shape[-1])[labels]
    fields: NDArray[np.float64] = np.einsum("mialb,mslb->msia", couplings, is_label, optimize=True)
    return fields


def _ascend(
    couplings: NDArray[np.float64], alone: NDArray[np.float64], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Each labelling with one label changed after the other, while that raises the utility."""
    fields = _fields(couplings, labels)
    models = np.arange(len(couplings))[:, None]
    while True:
        before = labels.copy()
        for place in range(labels.shape[-1]):
            # A label changes its own log-odds and, by as much, those of the others.
            best = (alone[:, None, place] + 2 * fields[:, :, place]).argmax(axis=-1)
            columns = couplings[:, :, :, place]
            fields += columns[models, :, :, best] - columns[models, :, :, labels[:, :, place]]
            labels[:, :, place] = best
        if (labels == before).all():
            return labels
