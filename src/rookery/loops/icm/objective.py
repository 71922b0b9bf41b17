"""U = alpha * P - I: how well the labels predict one another, less the constraints they break.

    assessment = assess(labels, reads, config=ObjectiveConfig(), num_violated=0)
    assessment.utility, assessment.frustrated

A read holds the log-probabilities of all labels of one item, given all other labels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.search.annealing import argmax_label
from rookery.search.labelling import Labels, labelled_items

__all__ = ["Assessment", "LabelLogprobs", "ObjectiveConfig", "assess", "log_odds", "predict"]

LabelLogprobs = tuple[float, ...]
"""Log-probabilities of the labels, as the model gives them over its whole vocabulary."""


class ObjectiveConfig(Config):
    """What a labelling is worth."""

    alpha: float = Field(default=50.0, gt=0)
    """The weight of predictability against one broken pair of a constraint."""
    measure: Literal["logodds", "logprob"] = "logodds"
    """log p(label) - log p(any other label), or log p(label) among the labels."""
    reduce: Literal["mean", "sum"] = "mean"
    """Over the labelled items. A sum of log-probabilities is the paper's, a mean of log-odds its
    code's."""
    calibrate: bool = False
    """Subtract each label's mean over the labelled items: what a model says of every item is its
    habit, not its view of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What one evaluation of a labelling says."""

    utility: float
    predictability: float
    num_violated: int
    frustrated: tuple[int, ...]
    """Labelled items that the others predict to have another label."""
    margins: Mapping[int, float]
    """Log-odds of its label for each labelled item; negative where it is frustrated."""
    prior: LabelLogprobs
    """What calibration subtracts; zeros without it."""
    mass: float
    """Mean probability that the model gives all labels together: near 1 when it knows the task."""

    @property
    def num_labelled(self) -> int:
        return len(self.margins)


def assess(
    labels: Labels,
    reads: Mapping[int, LabelLogprobs],
    *,
    config: ObjectiveConfig,
    num_violated: int,
) -> Assessment:
    """U of a labelling from one read of each labelled item."""
    items = labelled_items(labels)
    normal = {item: normalised(reads[item]) for item in items}
    prior = _prior(list(normal.values())) if config.calibrate else (0.0,) * len(reads[items[0]])
    values = {item: _without(normal[item], prior) for item in items}
    margins = {item: log_odds(values[item], labels[item]) for item in items}
    if config.measure == "logodds":
        total = math.fsum(margins.values())
    else:
        total = math.fsum(values[item][labels[item]] for item in items)
    predictability = total / len(items) if config.reduce == "mean" else total
    return Assessment(
        utility=config.alpha * predictability - num_violated,
        predictability=predictability,
        num_violated=num_violated,
        frustrated=tuple(i for i in items if argmax_label(values[i]) != labels[i]),
        margins=margins,
        prior=prior,
        mass=math.fsum(math.exp(_logsumexp(reads[item])) for item in items) / len(items),
    )


def predict(read: LabelLogprobs, *, prior: LabelLogprobs) -> LabelLogprobs:
    """The log-probabilities among the labels, calibrated as the current labelling is."""
    return _without(normalised(read), prior)


def normalised(read: LabelLogprobs) -> LabelLogprobs:
    """The same odds, probabilities that sum to 1."""
    total = _logsumexp(read)
    return tuple(value - total for value in read)


def _without(read: LabelLogprobs, prior: LabelLogprobs) -> LabelLogprobs:
    return normalised(tuple(a - b for a, b in zip(read, prior, strict=True)))


def _prior(reads: Sequence[LabelLogprobs]) -> LabelLogprobs:
    return tuple(math.fsum(column) / len(reads) for column in zip(*reads, strict=True))


def log_odds(read: LabelLogprobs, label: int) -> float:
    return read[label] - _logsumexp([v for i, v in enumerate(read) if i != label])


def _logsumexp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))
