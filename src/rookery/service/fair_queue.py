"""Whose work is next: fair between tenants by tokens, in order within a tenant.

A tenant's clock advances by the tokens of its work as that is taken; the tenant whose clock is
furthest behind is next. One that comes back after a pause starts at the clock of those who are
there: time that was not used is not saved up.

    ada queues 100 works of 10 tokens, then bob one of 10: bob's is taken second.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Place"]

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item is: how many are taken before it, and how many tokens those have."""

    ahead: int
    tokens_ahead: int


@dataclass(slots=True)
class _Line(Generic[Item]):
    """The items of one tenant; `tokens_in` and `tokens_out` count since the line began."""

    clock: float
    items: deque[tuple[Item, int]] = field(default_factory=deque)
    tokens_in: int = 0
    tokens_out: int = 0
    num_in: int = 0
    num_out: int = 0

    @property
    def tokens(self) -> int:
        return self.tokens_in - self.tokens_out


class FairQueue(Generic[Item]):
    """Not bounded itself: who fills it refuses what is too much. Costs of `place` grow with the
    number of tenants, not of items."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        self._entered: dict[Item, tuple[str, int, int]] = {}
        """Tenant, number and tokens that had entered its line before it."""
        self._clock = 0.0
        self._next: _Line[Item] = _Line(0.0)
        """The line whose first item is next, as `head` found it."""

    def __len__(self) -> int:
        return len(self._entered)

    @property
    def tokens(self) -> int:
        """Of all items that wait."""
        return sum(line.tokens for line in self._lines.values())

    def tenants(self) -> Iterator[tuple[str, int, int]]:
        """Those who wait: name, items, tokens."""
        for tenant, line in self._lines.items():
            yield tenant, len(line.items), line.tokens

    def put(self, item: Item, *, tenant: str, tokens: int) -> None:
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._clock)
        self._entered[item] = (tenant, line.num_in, line.tokens_in)
        line.items.append((item, tokens))
        line.num_in += 1
        line.tokens_in += tokens

    def take(self) -> Item | None:
        """The next item; None when there is none."""
        item = self.head()
        if item is not None:
            self._pop()
            del self._entered[item]
        return item

    def head(self) -> Item | None:
        """What `take` would give."""
        while self._lines:
            tenant = min(self._lines, key=lambda name: self._lines[name].clock)
            line = self._lines[tenant]
            if not line.items:
                # What it paid in advance is not owed by the others: their clocks are behind it.
                del self._lines[tenant]
                continue
            self._next = line
            item, _ = line.items[0]
            if item in self._entered:
                return item
            self._pop()
        return None

    def _pop(self) -> None:
        line = self._next
        self._clock = line.clock
        _, tokens = line.items.popleft()
        line.clock += tokens
        line.tokens_out += tokens
        line.num_out += 1

    def remove(self, item: Item) -> bool:
        """Take an item out of its line; False when it does not wait. It pays all the same."""
        return self._entered.pop(item, None) is not None

    def place(self, item: Item) -> Place | None:
        """An estimate: other tenants are taken in turn with this one. None when not waiting."""
        entered = self._entered.get(item)
        if entered is None:
            return None
        tenant, number, tokens_before = entered
        line = self._lines[tenant]
        ahead, tokens = number - line.num_out, tokens_before - line.tokens_out
        others = [other for name, other in self._lines.items() if name != tenant]
        return Place(
            ahead=ahead + sum(min(len(other.items), ahead + 1) for other in others),
            tokens_ahead=tokens + sum(min(other.tokens, tokens + 1) for other in others),
        )
