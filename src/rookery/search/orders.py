"""The order of the other items before each target, so that targets share the prefixes they can.

    order = TreeOrder([(0, 1), (2, 3)])
    order.of(0)       # (2, 3, 1): the far half first, then the sibling
    order.of(1)       # (2, 3, 0)

Leaving one item out of a fixed list shares half of the work. On a balanced tree a target's prefix
is, from the root down, the half it is not in; N contexts of N - 1 items then cost about
N log2 N items in place of N * N. An order never changes: unlabelled items are skipped.
"""

from collections.abc import Sequence
from functools import cached_property

__all__ = ["IdOrder", "Order", "TreeOrder"]


class IdOrder:
    """All other items as they are numbered: what a plain loop over the data does."""

    def __init__(self, num_items: int) -> None:
        self.leaves = tuple(range(num_items))

    def of(self, target: int) -> tuple[int, ...]:
        return self.leaves[:target] + self.leaves[target + 1 :]


class TreeOrder:
    """A balanced tree whose leaves are the items; a group of items is a subtree.

    So the items that are tied to a target stand last, next to it.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(tuple(group) for group in groups)
        self.leaves = tuple(item for group in self._groups for item in group)
        """The items from left to right: asked in this order, a small cache is enough."""

    def of(self, target: int) -> tuple[int, ...]:
        """Every other item, the farthest first."""
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
    """Cut where both sides have as equal numbers of items as whole groups allow."""
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
