"""What labels may not be together, known from the form of the items and never from the answer.

    constraints = Constraints([Exclusive(members=(0, 1), label=0)], num_items=2, num_labels=2)
    constraints.num_violated((0, 0))                   # 1: both carry the label
    constraints.repairs((0, -1), item=1, label=0)      # ((1, 0), (0, 1), (1, 1))

Items that constraints tie together, directly or through others, form a component. A component is
repaired as a whole: every consistent labelling of it is tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from rookery.search.labelling import UNLABELLED, Labels, relabel

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
            pairs = combinations(zip(members, answers, strict=True), 2)
            return sum(_disagree(labels[a], labels[b], x == y, label) for (a, x), (b, y) in pairs)
        case AsymmetricPair(first=first, second=second, mirror=mirror):
            one, other = labels[first], labels[second]
            return int(UNLABELLED not in (one, other) and mirror[one] != other)


def _disagree(one: int, other: int, is_same: bool, label: int) -> bool:
    if UNLABELLED in (one, other):
        return False
    return one != other if is_same else one == other == label


class Constraints:
    """All constraints over one list of items, and the components they tie together."""

    def __init__(
        self, constraints: Sequence[Constraint], *, num_items: int, num_labels: int
    ) -> None:
        self._all = tuple(constraints)
        self._num_labels = num_labels
        self._own: dict[int, tuple[Constraint, ...]] = {}
        self.components = _components(self._all, num_items)
        """Every item in one component, by first item; an item without constraints is its own."""
        self._component = {item: own for own in self.components for item in own}
        by_first: dict[int, list[Constraint]] = {}
        for constraint in self._all:
            by_first.setdefault(self._component[_members(constraint)[0]][0], []).append(constraint)
        for component in self.components:
            self._own[component[0]] = tuple(by_first.get(component[0], ()))
            self._check_size(component, num_items)

    def num_violated(self, labels: Labels) -> int:
        """I(D): broken pairs of all constraints."""
        return sum(num_violations(constraint, labels) for constraint in self._all)

    def component(self, item: int) -> tuple[int, ...]:
        """The items tied to this one, itself included."""
        return self._component[item]

    def repairs(self, labels: Labels, *, item: int, label: int) -> tuple[Labels, ...]:
        """Every consistent way to take up a proposed label, the fewest other changes first.

        Where the proposal breaks nothing it is the only one. Otherwise all consistent labellings
        of the component's labelled items, `labels` itself left out: what is proposed is a change.
        """
        proposed = relabel(labels, item, label)
        if not self._is_broken(proposed, item):
            return (proposed,)
        found = [option for option in self.consistent(proposed, item=item) if option != labels]
        return tuple(sorted(found, key=lambda o: (_num_changes(o, proposed), o)))

    def consistent(self, labels: Labels, *, item: int) -> Iterator[Labels]:
        """The labellings that differ in the item's component only, on the same items, unbroken."""
        members = [m for m in self._component[item] if labels[m] != UNLABELLED]
        blank = list(labels)
        for member in members:
            blank[member] = UNLABELLED
        return self._fill(tuple(blank), members)

    def _fill(self, labels: Labels, members: Sequence[int]) -> Iterator[Labels]:
        if not members:
            yield labels
            return
        first, *rest = members
        for label in range(self._num_labels):
            extended = relabel(labels, first, label)
            if not self._is_broken(extended, first):
                yield from self._fill(extended, rest)

    def _is_broken(self, labels: Labels, item: int) -> bool:
        own = self._own[self._component[item][0]]
        return any(num_violations(constraint, labels) for constraint in own)

    def _check_size(self, component: tuple[int, ...], num_items: int) -> None:
        if len(component) == 1:
            return
        labels = [UNLABELLED] * num_items
        for member in component:
            labels[member] = 0
        for count, _ in enumerate(self.consistent(tuple(labels), item=component[0]), start=1):
            if count > MAX_OPTIONS:
                raise ValueError(
                    f"{len(component)} items are tied together by constraints and have over "
                    f"{MAX_OPTIONS} consistent labellings: each would cost an evaluation. Use "
                    "smaller groups or stricter constraints."
                )


def _members(constraint: Constraint) -> tuple[int, ...]:
    match constraint:
        case Implies(premise=premise, conclusion=conclusion):
            return (premise, conclusion)
        case AsymmetricPair(first=first, second=second):
            return (first, second)
        case _:
            return constraint.members


def _components(constraints: Sequence[Constraint], num_items: int) -> tuple[tuple[int, ...], ...]:
    root = list(range(num_items))

    def find(item: int) -> int:
        while root[item] != item:
            root[item] = root[root[item]]
            item = root[item]
        return item

    for constraint in constraints:
        first, *others = _members(constraint)
        for other in others:
            low, high = sorted((find(first), find(other)))
            root[high] = low
    found: dict[int, list[int]] = {}
    for item in range(num_items):
        found.setdefault(find(item), []).append(item)
    return tuple(tuple(members) for members in found.values())


def _num_changes(one: Labels, other: Labels) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
