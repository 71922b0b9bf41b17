"""Labellings, and constraints on labels.

labels = (0, UNLABELLED, 1)      # of three items, the first has label 0, the third label 1

    constraints = Constraints([Exclusive(members=(0, 1), label=0)], num_items=2, num_labels=2)
    constraints.num_violated((0, 0))                   # 1: both carry the label
    constraints.repairs((0, -1), item=1, label=0)      # ((1, 0), (0, 1), (1, 1))

Constraints follow from the form of the items, never from the answers. Items that they tie together,
directly or through others, form a component. Labelled items of a component that are tied through
labelled items are repaired as a whole: every consistent labelling of them is tried.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import comb

import numpy as np
from numpy.typing import NDArray

from rookery.types import TokenIds

__all__ = [
    "UNLABELLED",
    "Allowed",
    "AsymmetricPair",
    "Constraint",
    "Constraints",
    "EqualAnswer",
    "Exclusive",
    "IdOrder",
    "Implies",
    "Labels",
    "Order",
    "PrefixCache",
    "Rule",
    "TreeOrder",
    "assignments",
    "labelled_items",
    "num_violations",
    "relabel",
]


Labels = tuple[int, ...]

UNLABELLED = -1


def labelled_items(labels: Labels) -> tuple[int, ...]:
    """Return the items that have a label, in item order."""
    return tuple(item for item, label in enumerate(labels) if label != UNLABELLED)


def relabel(labels: Labels, item: int, label: int) -> Labels:
    """Return a copy with one label changed: relabel((0, 1), 1, 0) is (0, 0)."""
    return (*labels[:item], label, *labels[item + 1 :])


# The order of the other items before each target, chosen so that targets share prefixes.
#
#     order = TreeOrder([(0, 1), (2, 3)])
#     order.of(0)       # (2, 3, 1): the far half first, then the sibling
#     order.of(1)       # (2, 3, 0)
#
# Leaving one item out of a fixed list shares half of the work. On a balanced tree a target's prefix
# is, from the root down, the half that it is not in. N contexts of N - 1 items then cost about N
# log2 N items instead of N * N. An order never changes: unlabelled items are skipped.


class IdOrder:
    """All other items by number, as in a plain loop over the data."""

    def __init__(self, num_items: int) -> None:
        self.leaves = tuple(range(num_items))

    def of(self, target: int) -> tuple[int, ...]:
        return self.leaves[:target] + self.leaves[target + 1 :]


class TreeOrder:
    """A balanced tree whose leaves are the items; a group of items is a subtree. Items that are
    tied to a target therefore come last, next to it."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(tuple(group) for group in groups)
        self.leaves = tuple(item for group in self._groups for item in group)
        """The items from left to right: asking in this order needs only a small cache."""

    def of(self, target: int) -> tuple[int, ...]:
        """Return every other item, the farthest first."""
        return self._orders[target]

    @cached_property
    def _orders(self) -> dict[int, tuple[int, ...]]:
        orders: dict[int, tuple[int, ...]] = {}
        stack: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = [(self._groups, ())]
        while stack:
            groups, prefix = stack.pop()
            if len(groups) == 1 and len(groups[0]) == 1:
                orders[groups[0][0]] = prefix
                continue
            left, right = _halves(groups)
            stack.append((left, prefix + _leaves(right)))
            stack.append((right, prefix + _leaves(left)))
        return orders


Order = IdOrder | TreeOrder


def _halves(
    groups: tuple[tuple[int, ...], ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Cut at the group boundary where both sides have the most equal numbers of items."""
    if len(groups) == 1:
        middle = (len(groups[0]) + 1) // 2
        return (groups[0][:middle],), (groups[0][middle:],)
    total = sum(len(group) for group in groups)
    best, gap, before = 1, total, 0
    for cut in range(1, len(groups)):
        before += len(groups[cut - 1])
        if abs(total - 2 * before) < gap:
            best, gap = cut, abs(total - 2 * before)
    return groups[:best], groups[best:]


def _leaves(groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(item for group in groups for item in group)


# Counts the prompt tokens that a prefix cache leaves to compute, to the token.
#
#     cache = PrefixCache(block_tokens=16)
#     cache.add(tokens)      # tokens to compute for this prompt: all of them the first time
#     cache.add(tokens)      # only its last block
#
# This models a paged cache. Full blocks are looked up by the tokens up to their end, and the last
# token of a prompt is always computed. Beyond `capacity_tokens` the least recently used blocks are
# dropped, the last ones of a prompt before those they build on.


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers never become 0: the hash of a prefix is a sum over its tokens."""


class PrefixCache:
    """Cached blocks, by the hash of the prefix that each ends."""

    def __init__(self, *, block_tokens: int = 16, capacity_tokens: int | None = None) -> None:
        self._block = block_tokens
        self._capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()
        self._powers = np.ones(1, dtype=np.uint64)

    def add(self, tokens: TokenIds | NDArray[np.uint64], *, salt: int = 0) -> int:
        """Add a prompt and return the number of its tokens that had to be computed.

        `salt` identifies the model: models do not share prefixes.
        """
        ends = self._ends(np.asarray(tokens, dtype=np.uint64), salt)
        known = self._known
        # A block is never kept without its predecessors, so the known blocks come first.
        num_known = bisect_left(ends, True, key=lambda end: end not in known)
        hits = min(num_known, (len(tokens) - 1) // self._block)
        known.update(dict.fromkeys(reversed(ends[num_known:])))
        if self._capacity is not None:
            deque(map(known.move_to_end, reversed(ends[:num_known])), maxlen=0)
            while len(known) > self._capacity:
                known.popitem(last=False)
        return len(tokens) - hits * self._block

    def _ends(self, tokens: NDArray[np.uint64], salt: int) -> list[int]:
        """Return a hash per full block, over every token up to its end."""
        if len(tokens) > len(self._powers):
            powers = np.full(2 * len(tokens), _FACTOR, dtype=np.uint64)
            powers[0] = 1
            self._powers = np.cumprod(powers)
        mixed = (tokens + np.uint64(salt + 1)) * _FACTOR
        mixed ^= mixed >> np.uint64(29)
        sums = np.cumsum(mixed * self._powers[: len(tokens)])
        ends: list[int] = sums[self._block - 1 :: self._block].tolist()
        return ends


# Enumerates all labels of items that keep all rules: propagation first, then backtracking.
#
#     rules = [Rule(members=(0, 1), narrow=unlike)]
#     list(assignments((0, 1), rules, num_labels=2))     # [(0, 1), (1, 0)]
#
# An item's allowed labels are bits: 0b01 is label 0 alone, 0b11 is either of two. A rule narrows
# them. With two labels and rules about pairs no choice is ever undone. Otherwise a search without a
# solution for `MAX_STEPS` steps raises ValueError.


Allowed = Mapping[int, int]
"""Item -> its allowed labels, as bits. Items that are missing have no label."""

MAX_STEPS = 1000
"""Choices without a solution before a search gives up: a few seconds at most."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule on the labels of some items."""

    members: tuple[int, ...]
    narrow: Callable[[Allowed], Iterable[tuple[int, int]]]
    """Yields items with the labels that the rule leaves them; an item may come more than once."""


def assignments(
    items: Sequence[int], rules: Sequence[Rule], *, num_labels: int
) -> Iterator[tuple[int, ...]]:
    """Yield all labels of the items that keep the rules, in lexicographic order."""
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
            yield tuple(allowed[place].bit_length() - 1 for place in items)
            continue
        num_steps += 1
        if num_steps > MAX_STEPS:
            raise ValueError(
                f"{len(items)} items are tied together by constraints for which no labels were "
                f"found in {MAX_STEPS} steps: the constraints contradict one another, or are too "
                "entangled. Use smaller groups or fewer constraints."
            )
        # Push the last label first, so that the stack pops the first one first.
        stack += reversed(list(search.children(allowed, item)))


class _Search:
    """A backtracking search, with rules indexed by item."""

    def __init__(self, items: Sequence[int], rules: Sequence[Rule], num_labels: int) -> None:
        self._items = items
        self._rules = rules
        self._num_labels = num_labels
        self._rules_of: dict[int, list[int]] = {item: [] for item in items}
        for index, rule in enumerate(rules):
            for member in rule.members:
                if member in self._rules_of:
                    self._rules_of[member].append(index)

    def undecided(self, allowed: Allowed) -> int | None:
        """Return the first item that still allows more than one label."""
        return next((item for item in self._items if allowed[item] & (allowed[item] - 1)), None)

    def children(self, allowed: Allowed, item: int) -> Iterator[dict[int, int]]:
        """Yield the state for each label of the item that breaks no rule at once."""
        for label in range(self._num_labels):
            if allowed[item] >> label & 1:
                child = {**allowed, item: 1 << label}
                if self.propagate(child, self._rules_of[item]):
                    yield child

    def propagate(self, allowed: dict[int, int], rules: Iterable[int]) -> bool:
        """Narrow until nothing changes; return False if an item is left without a label."""
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
                    waiting.update(dict.fromkeys(self._rules_of[item]))
        return True

    def is_refuted(self, start: Allowed) -> bool:
        """Whether some item can have no label at all.

        Labels that break nothing are kept on the way. With two labels and rules about pairs they
        cannot make a later item impossible, so that this finds every contradiction.
        """
        allowed = start
        while (item := self.undecided(allowed)) is not None:
            child = next(self.children(allowed, item), None)
            if child is None:
                return next(self.children(start, item), None) is None
            allowed = child
        return False


MAX_OPTIONS = 256
"""Most consistent labellings of a component: each of them costs an evaluation of all items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """At most one member has the label; if `is_exact`, exactly one of a fully labelled group."""

    members: tuple[int, ...]
    label: int
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Implies:
    """If the premise has the label, so does the conclusion."""

    premise: int
    conclusion: int
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualAnswer:
    """Members with equal answers have equal labels; different answers never both have `label`.

    Four solutions of one problem that end in 26, 18, 18 and 7: the two 18s are both right or both
    wrong, and two that differ are not both right.
    """

    members: tuple[int, ...]
    answers: tuple[str, ...]
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AsymmetricPair:
    """The two orders of one comparison: the label of one is the mirror of the other's. mirror (1,
    0): "first is better" and "first is not better" turn into each other."""

    first: int
    second: int
    mirror: tuple[int, ...]


Constraint = Exclusive | Implies | EqualAnswer | AsymmetricPair


def num_violations(constraint: Constraint, labels: Sequence[int]) -> int:
    """Count the pairs that break it; an exact exclusive group without the label counts as one.
    Unlabelled items break nothing, so labelling more items never lowers the number."""
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
            counts = Counter(
                (answer, carried) for answer, carried in pairs if carried != UNLABELLED
            )
            return _num_unlike(counts) + _num_both(counts, label)
        case AsymmetricPair(first=first, second=second, mirror=mirror):
            one, other = labels[first], labels[second]
            return int(UNLABELLED not in (one, other) and mirror[one] != other)


def _num_unlike(held: Counter[tuple[str, int]]) -> int:
    """Count pairs of equal answers and different labels."""
    sizes: Counter[str] = Counter()
    for (answer, _), number in held.items():
        sizes[answer] += number
    return sum(comb(n, 2) for n in sizes.values()) - sum(comb(n, 2) for n in held.values())


def _num_both(held: Counter[tuple[str, int]], label: int) -> int:
    """Count pairs of different answers that both have the label."""
    carriers = [number for (_, held_label), number in held.items() if held_label == label]
    return comb(sum(carriers), 2) - sum(comb(number, 2) for number in carriers)


def _narrow(constraint: Constraint, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """Yield the labels that a constraint leaves its labelled members, as bits."""
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
    """All constraints over one list of items, and their components."""

    def __init__(
        self, constraints: Sequence[Constraint], *, num_items: int, num_labels: int
    ) -> None:
        self._all = tuple(constraints)
        self._num_labels = num_labels
        self.components = _components(self._all, range(num_items))
        """Every item in one component, by first item; an item without constraints is its own."""
        self._component = {item: component for component in self.components for item in component}
        self._by_first: dict[int, list[Constraint]] = {
            component[0]: [] for component in self.components
        }
        for constraint in self._all:
            self._by_first[self._component[_members(constraint)[0]][0]].append(constraint)
        self.contradictions = tuple(
            component for component in self.components if not self._num_options(component)
        )
        """Components without a consistent labelling."""

    def num_violated(self, labels: Labels) -> int:
        """I(D): number of broken pairs of all constraints."""
        return sum(num_violations(constraint, labels) for constraint in self._all)

    def component(self, item: int) -> tuple[int, ...]:
        """Return the items tied to this one, itself included."""
        return self._component[item]

    def tied(self, labels: Labels, item: int) -> tuple[int, ...]:
        """Return the labelled items that constraints between labelled items tie to this one."""
        component = self._component[item]
        held = [member for member in component if labels[member] != UNLABELLED]
        if len(held) == len(component):
            return component
        parts = _components(self._by_first[component[0]], held)
        return next((part for part in parts if item in part), ())

    def repairs(self, labels: Labels, *, item: int, label: int) -> tuple[Labels, ...]:
        """Return every consistent way to accept a proposed label, the fewest other changes first.

        If the proposal breaks nothing, it is the only one. Otherwise these are all consistent
        labellings of the items tied to it except `labels` itself, since a proposal is a change.
        """
        proposed = relabel(labels, item, label)
        if not self._is_broken(proposed, item):
            return (proposed,)
        options = [option for option in self.consistent(proposed, item=item) if option != labels]
        return tuple(sorted(options, key=lambda o: (_num_changes(o, proposed), o)))

    def consistent(self, labels: Labels, *, item: int) -> Iterator[Labels]:
        """Yield unbroken labellings that differ only in the items tied to this one, in order. Only
        labelled items tie. Unlabelled items stay unlabelled."""
        members = self.tied(labels, item)
        for values in self._assignments(members):
            option = list(labels)
            for member, value in zip(members, values, strict=True):
                option[member] = value
            yield tuple(option)

    def fewest(self, labels: Labels, label: int) -> int:
        """Return how many of the labelled items must have the label, whatever the others have. In
        an exact exclusive pair, one item has each label."""
        least, seen = 0, set[int]()
        for item in labelled_items(labels):
            if item not in seen:
                tied = self.tied(labels, item)
                seen.update(tied)
                least += min(
                    (assignment.count(label) for assignment in self._assignments(tied)), default=0
                )
        return least

    def _assignments(self, members: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        constraints = self._by_first[self._component[members[0]][0]] if members else []
        rules = [Rule(members=_members(c), narrow=partial(_narrow, c)) for c in constraints]
        return assignments(members, rules, num_labels=self._num_labels)

    def _is_broken(self, labels: Labels, item: int) -> bool:
        constraints = self._by_first[self._component[item][0]]
        return any(num_violations(constraint, labels) for constraint in constraints)

    def _num_options(self, component: tuple[int, ...]) -> int:
        """Count a whole component's consistent labellings; ValueError if there are too many."""
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
    """Split the items into parts that constraints tie together; other items tie nothing."""
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
    by_root: dict[int, list[int]] = {}
    for item in items:
        by_root.setdefault(find(item), []).append(item)
    return tuple(tuple(members) for members in by_root.values())


def _num_changes(one: Labels, other: Labels) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
