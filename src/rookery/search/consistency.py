"""Every way to give items labels so that all rules hold: propagation first, then trying.

    rules = [Rule(members=(0, 1), narrow=unlike)]
    list(assignments((0, 1), rules, num_labels=2))     # [(0, 1), (1, 0)]

What an item may still be is a set of labels, as bits: 0b01 is label 0 alone, 0b11 is either of
two. A rule narrows these sets. With two labels and rules about pairs no choice has to be
undone; otherwise a search that finds nothing for `MAX_STEPS` steps gives up with a ValueError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Allowed", "Rule", "assignments"]

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
