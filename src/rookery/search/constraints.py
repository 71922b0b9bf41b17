"""What labels may not be together, known from the form of the items and never from the answer.

    constraints = Constraints([Exclusive(members=(0, 1), label=0)], num_items=2, num_labels=2)
    constraints.num_violated((0, 0))                   # 1: both carry the label
    constraints.repairs((0, -1), item=1, label=0)      # ((1, 0), (0, 1), (1, 1))

Items that constraints tie together, directly or through others, form a component. What has labels
of a component and is tied by labelled items is repaired as a whole: every consistent labelling of
it is tried.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

from rookery.search.labelling import UNLABELLED, Labels, labelled_items, relabel

__all__ = [
    "Allowed",
    "AsymmetricPair",
    "Constraint",
    "Constraints",
    "EqualAnswer",
    "Exclusive",
    "Implies",
    "Rule",
    "assignments",
    "num_violations",
]

# Every way to give items labels so that all rules hold: propagation first, then trying.
#
#     rules = [Rule(members=(0, 1), narrow=unlike)]
#     list(assignments((0, 1), rules, num_labels=2))     # [(0, 1), (1, 0)]
#
# What an item may still be is a set of labels, as bits: 0b01 is label 0 alone, 0b11 is either of
# two. A rule narrows these sets. With two labels and rules about pairs no choice has to be
# undone; otherwise a search that finds nothing for `MAX_STEPS` steps gives up with a ValueError.


Allowed = Mapping[int, int]
"""Item -> the labels it may still have, as bits. Items that are not in it have no label."""

MAX_STEPS = 1000
"""Choices without a solution before a search gives up: a few seconds at most."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What some items may be together."""

    members: tuple[int, ...]
    narrow: Callable[[Allowed], Iterable[tuple[int, int]]]
    """Items and the labels that the rule leaves them; an item may come more than once."""


def assignments(
    items: Sequence[int], rules: Sequence[Rule], *, num_labels: int
) -> Iterator[tuple[int, ...]]:
    """The labels of the items in every way that keeps the rules, in lexicographic order."""
    search = _Search(items, rules, num_labels)
    start = dict.fromkeys(items, (1 << num_labels) - 1)
    if not search.propagate(start, range(len(rules))) or search.is_refuted(start):
        return
    stack, num_steps = [start], 0
    while stack:
        allowed = stack.pop()
        item = search.undecided(allowed)
        if item is None:
            num_steps = 0
            yield tuple(allowed[own].bit_length() - 1 for own in items)
            continue
        num_steps += 1
        if num_steps > MAX_STEPS:
            raise ValueError(
                f"{len(items)} items are tied together by constraints for which no labels were "
                f"found in {MAX_STEPS} steps: the constraints contradict one another, or are too "
                "entangled. Use smaller groups or fewer constraints."
            )
        # The last label first: the stack gives the first one back first.
        stack += reversed(list(search.children(allowed, item)))


class _Search:
    """The rules by item."""

    def __init__(self, items: Sequence[int], rules: Sequence[Rule], num_labels: int) -> None:
        self._items = items
        self._rules = rules
        self._num_labels = num_labels
        self._of: dict[int, list[int]] = {item: [] for item in items}
        for index, rule in enumerate(rules):
            for member in rule.members:
                if member in self._of:
                    self._of[member].append(index)

    def undecided(self, allowed: Allowed) -> int | None:
        """The first item that may still have more than one label."""
        return next((own for own in self._items if allowed[own] & (allowed[own] - 1)), None)

    def children(self, allowed: Allowed, item: int) -> Iterator[dict[int, int]]:
        """What is left with each label of the item that does not break a rule at once."""
        for label in range(self._num_labels):
            if allowed[item] >> label & 1:
                child = {**allowed, item: 1 << label}
                if self.propagate(child, self._of[item]):
                    yield child

    def propagate(self, allowed: dict[int, int], rules: Iterable[int]) -> bool:
        """Narrow until nothing changes; False if an item is left without a label."""
        waiting = dict.fromkeys(rules)
        while waiting:
            index = next(iter(waiting))
            del waiting[index]
            for item, mask in list(self._rules[index].narrow(allowed)):
                left = allowed[item] & mask
                if not left:
                    return False
                if left != allowed[item]:
                    allowed[item] = left
                    waiting.update(dict.fromkeys(self._of[item]))
        return True

    def is_refuted(self, start: Allowed) -> bool:
        """Whether some item can have no label at all.

        Labels that break nothing are taken up on the way: with two labels and rules about pairs
        they cannot be what makes a later item impossible, so that this finds every contradiction.
        """
        allowed = start
        while (item := self.undecided(allowed)) is not None:
            child = next(self.children(allowed, item), None)
            if child is None:
                return next(self.children(start, item), None) is None
            allowed = child
        return False


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
