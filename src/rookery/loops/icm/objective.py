"""U = alpha * P - I: the mutual predictability of labels, less the constraints they break.

    assessment = assess(labels, reads, config=ObjectiveConfig(), num_violated=0)
    assessment.utility, assessment.frustrated

A read is the log-probabilities of all labels for one item, given the labels of all others.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.icm.items import Item
from rookery.search.annealing import argmax_label
from rookery.search.labelling import (
    AsymmetricPair,
    Constraint,
    Constraints,
    EqualAnswer,
    Exclusive,
    Implies,
    Labels,
    labelled_items,
)

__all__ = [
    "Assessment",
    "AsymmetricPairConfig",
    "ConstraintConfig",
    "EqualAnswerConfig",
    "ExclusiveConfig",
    "ImpliesConfig",
    "LabelLogprobs",
    "ObjectiveConfig",
    "assess",
    "build_constraints",
    "fields_of",
    "log_odds",
    "predict",
]

# Constraints of a config, over fields of the items, become constraints over indices:
#
#     constraints:
#       - {type: exclusive, group: question, count: exactly_one}
#       - {type: equal_answer, answer: solution, pattern: "A: (.+)$"}
#       - {type: asymmetric_pair, group: pair}
#       - {type: implies, field: implies}
#
# They describe the items' form: which belong together, what their final answer is. A field derived
# from true labels would leak them into the search.


class _GroupConfig(Config):
    group: str = ""
    """Field of the constrained groups: items with equal values. Empty: data.group."""


class ExclusiveConfig(_GroupConfig):
    """At most one item of a group has the label, or exactly one."""

    type: Literal["exclusive"] = "exclusive"
    label: str = ""
    """The exclusive label. Empty: the first label."""
    count: Literal["at_most_one", "exactly_one"] = "at_most_one"
    """Number of items of a group that have the label."""


class EqualAnswerConfig(_GroupConfig):
    """Items of a group with equal answers have equal labels. Unequal answers are not both right."""

    type: Literal["equal_answer"] = "equal_answer"
    answer: str
    """Field that is the answer or contains it."""
    pattern: str = ""
    """Regular expression whose first group is the answer: "A: (.+)$". Empty: the whole field."""
    missing: Literal["error", "free"] = "error"
    """Treatment of an item in which the pattern finds no answer, such as a truncated solution:
    `error` refuses it, `free` exempts it from this constraint."""
    label: str = ""
    """Label of right answers. Empty: the first label."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, value: str) -> str:
        try:
            num_groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"the pattern {value!r} is not a regex: {error}") from None
        if value and not num_groups:
            raise ValueError(f"the pattern {value!r} has no group: write (...) around the answer")
        return value


class AsymmetricPairConfig(_GroupConfig):
    """Two items are the same comparison in both orders, so their labels mirror each other."""

    type: Literal["asymmetric_pair"] = "asymmetric_pair"
    mirror: dict[str, str] = Field(default_factory=dict)
    """Mirror of each label; others mirror themselves: {"first": "second"} leaves "tie" a tie.
    Empty, with two labels: each mirrors the other."""


class ImpliesConfig(Config):
    """An item with the label implies that the items it names have it too."""

    type: Literal["implies"] = "implies"
    field: str = "implies"
    """Field with the id or list of ids that the item implies. Items may lack it."""
    label: str = ""
    """The implied label. Empty: the first label."""


ConstraintConfig = Annotated[
    AsymmetricPairConfig | EqualAnswerConfig | ExclusiveConfig | ImpliesConfig,
    Field(discriminator="type"),
]


def fields_of(config: ConstraintConfig) -> set[str]:
    """Return the item fields that a constraint reads."""
    match config:
        case ImpliesConfig(field=field):
            return {field}
        case EqualAnswerConfig(group=group, answer=answer):
            return {group, answer} - {""}
        case _:
            return {config.group} - {""}


def build_constraints(
    configs: Sequence[ConstraintConfig], *, items: Sequence[Item], labels: Sequence[str]
) -> Constraints:
    """Build the constraints of one batch."""
    listed = [c for config in configs for c in _build(config, items=items, labels=labels)]
    try:
        constraints = Constraints(listed, num_items=len(items), num_labels=len(labels))
    except ValueError as error:
        raise TaskError(str(error)) from None
    for tied in constraints.contradictions:
        names = ", ".join(items[member].id for member in tied[:4])
        more = f" and {len(tied) - 4} more" if len(tied) > 4 else ""
        raise TaskError(
            f"The constraints of the items {names}{more} contradict one another: no labels keep "
            "them all. Fix or drop these items, or drop a constraint."
        )
    return constraints


def _build(
    config: ConstraintConfig, *, items: Sequence[Item], labels: Sequence[str]
) -> list[Constraint]:
    match config:
        case ExclusiveConfig():
            label, is_exact = _index(config.label, labels), config.count == "exactly_one"
            return [
                Exclusive(members=members, label=label, is_exact=is_exact)
                for members in _groups(config.group, items)
            ]
        case EqualAnswerConfig():
            return _equal_answers(config, items, _index(config.label, labels))
        case AsymmetricPairConfig():
            mirror = _mirror(config, labels)
            return [
                AsymmetricPair(first=first, second=second, mirror=mirror)
                for first, second in _pairs(config.group, items)
            ]
        case ImpliesConfig():
            return _implications(config, items, _index(config.label, labels))


def _groups(field: str, items: Sequence[Item]) -> list[tuple[int, ...]]:
    """Return the groups with two or more items."""
    by_value: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        value = json.dumps(_value(item, field), sort_keys=True) if field else item.group
        by_value.setdefault(value, []).append(index)
    return [tuple(members) for members in by_value.values() if len(members) > 1]


def _pairs(field: str, items: Sequence[Item]) -> list[tuple[int, int]]:
    pairs = []
    for members in _groups(field, items):
        if len(members) != 2:
            names = ", ".join(items[m].id for m in members[:4])
            raise TaskError(
                f"An asymmetric_pair is two items, the comparison and its reverse; a group has "
                f"{len(members)} ({names}): give the field that is equal for the two alone."
            )
        pairs.append((members[0], members[1]))
    return pairs


def _value(item: Item, field: str) -> object:
    if field not in item.fields:
        known = ", ".join(map(repr, item.fields))
        raise TaskError(f"Item {item.id} has no field {field!r} for a constraint; it has {known}.")
    return item.fields[field]


def _equal_answers(
    config: EqualAnswerConfig, items: Sequence[Item], label: int
) -> list[Constraint]:
    constraints: list[Constraint] = []
    for members in _groups(config.group, items):
        answers = {m: answer for m in members if (answer := _answer(config, items[m])) is not None}
        if len(answers) > 1:
            constraint = EqualAnswer(
                members=tuple(answers), answers=tuple(answers.values()), label=label
            )
            constraints.append(constraint)
    return constraints


def _answer(config: EqualAnswerConfig, item: Item) -> str | None:
    value = _value(item, config.answer)
    text = value if isinstance(value, str) else json.dumps(value)
    if not config.pattern:
        return text.strip()
    match = re.search(config.pattern, text)
    if match is not None:
        return str(match.group(1)).strip()
    if config.missing == "free":
        return None
    raise TaskError(
        f"Item {item.id}: the pattern {config.pattern!r} finds no answer in {text[-60:]!r}. Fix "
        "the pattern, or write missing: free, so that the constraint leaves such items out."
    )


def _mirror(config: AsymmetricPairConfig, labels: Sequence[str]) -> tuple[int, ...]:
    if not config.mirror:
        if len(labels) != 2:
            raise TaskError(
                f"asymmetric_pair with the labels {list(labels)} needs to know their mirrors: "
                'mirror: {"first": "second"}.'
            )
        return (1, 0)
    both = {**config.mirror, **{other: one for one, other in config.mirror.items()}}
    return tuple(_index(both.get(label, label), labels) for label in labels)


def _implications(config: ImpliesConfig, items: Sequence[Item], label: int) -> list[Constraint]:
    places = {item.id: index for index, item in enumerate(items)}
    constraints: list[Constraint] = []
    for index, item in enumerate(items):
        named = item.fields.get(config.field) or []
        for name in named if isinstance(named, list) else [named]:
            if str(name) not in places:
                raise TaskError(
                    f"Item {item.id} implies {name!r}, which is not an item of its batch: give "
                    "both the same data.group, so that they stay together."
                )
            constraints.append(Implies(premise=index, conclusion=places[str(name)], label=label))
    return constraints


def _index(label: str, labels: Sequence[str]) -> int:
    if label and label not in labels:
        raise TaskError(f"A constraint names the label {label!r}; there are {list(labels)}.")
    return labels.index(label) if label else 0


LabelLogprobs = tuple[float, ...]
"""Log-probabilities of the labels, over the model's whole vocabulary."""


class ObjectiveConfig(Config):
    """The utility of a labelling."""

    alpha: float = Field(default=50.0, gt=0)
    """Weight of predictability, relative to one pair of labels that breaks a constraint."""
    measure: Literal["logodds", "logprob"] = "logodds"
    """`logodds`: log p(label) - log p(other labels). `logprob`: log p(label) among the labels."""
    reduce: Literal["mean", "sum"] = "mean"
    """Reduce over labelled items. The paper sums log-probabilities, its code averages log-odds."""
    calibrate: bool = False
    """Subtract each label's mean over the labelled items. A preference that a model has for every
    item is a habit, not a judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The evaluation of one labelling."""

    utility: float
    num_violated: int
    frustrated: tuple[int, ...]
    """Labelled items for which the others predict another label."""
    margins: Mapping[int, float]
    """Log-odds of the label of each labelled item; negative if the item is frustrated."""
    prior: LabelLogprobs
    """Log-probabilities that calibration subtracts; zeros without it."""
    mass: float
    """Mean total probability of all labels: near 1 if the model understands the task."""

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
    """Compute U from one read per labelled item."""
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
        num_violated=num_violated,
        frustrated=tuple(i for i in items if argmax_label(values[i]) != labels[i]),
        margins=margins,
        prior=prior,
        mass=math.fsum(math.exp(_logsumexp(reads[item])) for item in items) / len(items),
    )


def predict(read: LabelLogprobs, *, prior: LabelLogprobs) -> LabelLogprobs:
    """Return the log-probabilities among the labels, calibrated with `prior`."""
    return _without(normalised(read), prior)


def normalised(read: LabelLogprobs) -> LabelLogprobs:
    """Normalise to probabilities that sum to 1."""
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
