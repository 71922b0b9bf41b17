"""What labels may not be together, known from the form of the items and never from the answer.

    constraints = Constraints([Exclusive(members=(0, 1), label=0)], num_items=2, num_labels=2)
    constraints.num_violated((0, 0))                   # 1: both carry the label
    constraints.repairs((0, -1), item=1, label=0)      # ((1, 0), (0, 1), (1, 1))

Items that constraints tie together, directly or through others, form a component. What has labels
of a component and is tied by labelled items is repaired as a whole: every consistent labelling of
it is tried.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

from rookery.search.consistency import Allowed, Rule, assignments
from rookery.search.labelling import UNLABELLED, Labels, labelled_items, relabel

__all__ = [
    "AsymmetricPair",
    "Constraint",
    "Constraints",
    "EqualAnswer",
    "Exclusive",
    "Implies",
    "num_violations",
]

MAX_OPTIONS = 256
"""Consistent labellings of one component at most: each of them costs an evaluation of all items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """At most one member carries the label; when `is_exact`, exactly one of a labelled group."""

    members: tuple[int, ...]
    label: int
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Implies:
    """When the premise carries the label, so does the conclusion."""

    premise: int
    conclusion: int
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualAnswer:
    """Members with equal answers have equal labels; different answers never both carry `label`.

    Four solutions of one problem that end in 26, 18, 18 and 7: the two 18s are both right or both
    wrong, and two that differ are not both right.
    """

    members: tuple[int, ...]
    answers: tuple[str, ...]
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AsymmetricPair:
    """The two orders of one comparison: the label of one is the mirror of the other's.

    mirror (1, 0): "first is better" and "first is not better" turn into each other.
    """

    first: int
    second: int
    mirror: tuple[int, ...]


Constraint = Exclusive | Implies | EqualAnswer | AsymmetricPair


def num_violations(constraint: Constraint, labels: Sequence[int]) -> int:
    """How many pairs break it; an exclusive group of which none carries the label counts as one.

    What is not labelled breaks nothing, so labelling more items never lowers the number.
    """
    match constraint:
        case Exclusive(members=members, label=label, is_exact=is_exact):
            held = sum(labels[m] == label for m in members)
            is_empty = held == 0 and all(labels[m] != UNLABELLED for m in members)
            return held * (held - 1) // 2 + int(is_exact and is_empty)
        case Implies(premise=premise, conclusion=conclusion, label=label):
            holds = labels[premise] != label or labels[conclusion] in (label, UNLABELLED)
            return int(not holds)
        case EqualAnswer(members=members, answers=answers, label=label):
            pairs = zip(answers, (labels[m] for m in members), strict=True)
            found = Counter((answer, own) for answer, own in pairs if own != UNLABELLED)
            return _num_unlike(found) + _num_both(found, label)
        case AsymmetricPair(first=first, second=second, mirror=mirror):
            one, other = labels[first], labels[second]
            return int(UNLABELLED not in (one, other) and mirror[one] != other)


def _num_unlike(held: Counter[tuple[str, int]]) -> int:
    """Pairs of equal answers and different labels."""
    sizes: Counter[str] = Counter()
    for (answer, _), number in held.items():
        sizes[answer] += number
    return sum(comb(n, 2) for n in sizes.values()) - sum(comb(n, 2) for n in held.values())


def _num_both(held: Counter[tuple[str, int]], label: int) -> int:
    """Pairs of different answers that both carry the label."""
    carriers = [number for (_, own), number in held.items() if own == label]
    return comb(sum(carriers), 2) - sum(comb(number, 2) for number in carriers)


def _narrow(constraint: Constraint, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """The labels that a constraint leaves its labelled members, as bits."""
    match constraint:
        case Exclusive(members=members, label=label, is_exact=is_exact):
            yield from _narrow_exclusive(members, 1 << label, is_exact, allowed)
        case Implies(premise=premise, conclusion=conclusion, label=label):
            if premise in allowed and conclusion in allowed:
                if allowed[premise] == 1 << label:
                    yield conclusion, 1 << label
                if not allowed[conclusion] >> label & 1:
                    yield premise, ~(1 << label)
        case EqualAnswer():
            yield from _narrow_equal(constraint, allowed)
        case AsymmetricPair(first=first, second=second, mirror=mirror):
            if first in allowed and second in allowed:
                pairs = [(a, b) for a, b in enumerate(mirror) if allowed[first] >> a & 1]
                pairs = [(a, b) for a, b in pairs if allowed[second] >> b & 1]
                yield first, sum({1 << a for a, _ in pairs})
                yield second, sum({1 << b for _, b in pairs})


def _narrow_exclusive(
    members: tuple[int, ...], bit: int, is_exact: bool, allowed: Allowed
) -> Iterator[tuple[int, int]]:
    labelled = [member for member in members if member in allowed]
    holder = next((member for member in labelled if allowed[member] == bit), None)
    if holder is not None:
        yield from ((member, ~bit) for member in labelled if member != holder)
    elif is_exact and len(labelled) == len(members):
        able = [member for member in labelled if allowed[member] & bit]
        if len(able) < 2:
            yield (able or labelled)[0], bit


def _narrow_equal(constraint: EqualAnswer, allowed: Allowed) -> Iterator[tuple[int, int]]:
    bit = 1 << constraint.label
    labelled = [
        (member, answer)
        for member, answer in zip(constraint.members, constraint.answers, strict=True)
        if member in allowed
    ]
    common: dict[str, int] = {}
    for member, answer in labelled:
        common[answer] = common.get(answer, -1) & allowed[member]
    holder = next((answer for answer, left in common.items() if left == bit), None)
    for member, answer in labelled:
        is_out = holder is not None and answer != holder
        yield member, common[answer] & ~bit if is_out else common[answer]


class Constraints:
    """All constraints over one list of items, and the components they tie together."""

    def __init__(
        self, constraints: Sequence[Constraint], *, num_items: int, num_labels: int
    ) -> None:
        self._all = tuple(constraints)
        self._num_labels = num_labels
        self.components = _components(self._all, range(num_items))
        """Every item in one component, by first item; an item without constraints is its own."""
        self._component = {item: own for own in self.components for item in own}
        self._own: dict[int, list[Constraint]] = {own[0]: [] for own in self.components}
        for constraint in self._all:
            self._own[self._component[_members(constraint)[0]][0]].append(constraint)
        self.contradictions = tuple(own for own in self.components if not self._num_options(own))
        """Components for which there is no consistent labelling."""

    def num_violated(self, labels: Labels) -> int:
        """I(D): broken pairs of all constraints."""
        return sum(num_violations(constraint, labels) for constraint in self._all)

    def component(self, item: int) -> tuple[int, ...]:
        """The items tied to this one, itself included."""
        return self._component[item]

    def tied(self, labels: Labels, item: int) -> tuple[int, ...]:
        """The labelled items that constraints between labelled items tie to this one."""
        component = self._component[item]
        held = [member for member in component if labels[member] != UNLABELLED]
        if len(held) == len(component):
            return component
        parts = _components(self._own[component[0]], held)
        return next((part for part in parts if item in part), ())

    def repairs(self, labels: Labels, *, item: int, label: int) -> tuple[Labels, ...]:
        """Every consistent way to take up a proposed label, the fewest other changes first.

        Where the proposal breaks nothing it is the only one. Otherwise all consistent labellings
        of the items tied to it, `labels` itself left out: what is proposed is a change.
        """
        proposed = relabel(labels, item, label)
        if not self._is_broken(proposed, item):
            return (proposed,)
        options = [option for option in self.consistent(proposed, item=item) if option != labels]
        return tuple(sorted(options, key=lambda o: (_num_changes(o, proposed), o)))

    def consistent(self, labels: Labels, *, item: int) -> Iterator[Labels]:
        """The labellings that differ only in what is tied to the item by labelled items, unbroken.

        In lexicographic order. Items without a label keep having none, and tie nothing.
        """
        members = self.tied(labels, item)
        for values in self._assignments(members):
            option = list(labels)
            for member, value in zip(members, values, strict=True):
                option[member] = value
            yield tuple(option)

    def fewest(self, labels: Labels, label: int) -> int:
        """How many of the labelled items must carry the label, whatever the others do.

        Of an exclusive pair of which exactly one is true, one carries each label.
        """
        least, seen = 0, set[int]()
        for item in labelled_items(labels):
            if item not in seen:
                tied = self.tied(labels, item)
                seen.update(tied)
                least += min((own.count(label) for own in self._assignments(tied)), default=0)
        return least

    def _assignments(self, members: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        constraints = self._own[self._component[members[0]][0]] if members else []
        rules = [Rule(members=_members(c), narrow=partial(_narrow, c)) for c in constraints]
        return assignments(members, rules, num_labels=self._num_labels)

    def _is_broken(self, labels: Labels, item: int) -> bool:
        constraints = self._own[self._component[item][0]]
        return any(num_violations(constraint, labels) for constraint in constraints)

    def _num_options(self, component: tuple[int, ...]) -> int:
        """Consistent labellings of a whole component, or a ValueError if there are too many."""
        if len(component) == 1:
            return self._num_labels
        count = 0
        for count, _ in enumerate(self._assignments(component), start=1):
            if count > MAX_OPTIONS:
                raise ValueError(
                    f"{len(component)} items are tied together by constraints and have over "
                    f"{MAX_OPTIONS} consistent labellings: each would cost an evaluation. Use "
                    "smaller groups or stricter constraints."
                )
        return count


def _members(constraint: Constraint) -> tuple[int, ...]:
    match constraint:
        case Implies(premise=premise, conclusion=conclusion):
            return (premise, conclusion)
        case AsymmetricPair(first=first, second=second):
            return (first, second)
        case _:
            return constraint.members


def _components(
    constraints: Sequence[Constraint], items: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The items in parts that constraints tie together; others tie nothing."""
    root = {item: item for item in items}

    def find(item: int) -> int:
        while root[item] != item:
            root[item] = root[root[item]]
            item = root[item]
        return item

    for constraint in constraints:
        held = [member for member in _members(constraint) if member in root]
        for other in held[1:]:
            low, high = sorted((find(held[0]), find(other)))
            root[high] = low
    found: dict[int, list[int]] = {}
    for item in items:
        found.setdefault(find(item), []).append(item)
    return tuple(tuple(members) for members in found.values())


def _num_changes(one: Labels, other: Labels) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
