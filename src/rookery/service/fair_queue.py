"""The order of work: fair between tenants by tokens, first come first served within a tenant.

When work of a tenant is taken, the tenant's clock advances by the work's tokens. The tenant with
the earliest clock is next. After a pause, a tenant starts at the clock of the others: unused time
is not saved up.

    ada queues 100 works of 10 tokens, then bob one of 10: bob's is taken second.
"""

import asyncio
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from typing import Generic, TypeVar

from rookery.runtime.concurrency import run_in_thread

__all__ = [
    "READERS",
    "FairQueue",
    "FairSemaphore",
    "QueuePlace",
]

Item = TypeVar("Item", bound=Hashable)
_CHANGES_PER_LINE = 8
"""`place` measures all lines anew after one change per this many lines: with 2,000 tenants, one in
eight may have moved by an item."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Position of an item: how many items precede it, and their tokens."""

    ahead: int
    tokens_ahead: int


@dataclass(slots=True)
class _Line(Generic[Item]):
    """Items of one tenant; the counters run since the line began."""

    clock: float
    items: deque[tuple[Item, int]] = field(default_factory=deque)
    tokens_in: int = 0
    tokens_out: int = 0
    num_in: int = 0
    num_out: int = 0

    @property
    def tokens(self) -> int:
        return self.tokens_in - self.tokens_out


class _Sizes:
    """Sizes of all lines, to sum the part of each line that precedes an item."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._sorted = sorted(sizes)
        self._sums = list(accumulate(self._sorted, initial=0))

    def total(self, most: int) -> int:
        """Return the sum of `min(size, most)`."""
        num_whole = bisect_right(self._sorted, most)
        return self._sums[num_whole] + most * (len(self._sorted) - num_whole)


class FairQueue(Generic[Item]):
    """An unbounded queue, whose callers refuse what is too much. Costs grow with the logarithm of
    the number of tenants, not with the number of items."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        self._order: list[tuple[float, int, str]] = []
        """Heap of all lines: clock, age, tenant."""
        self._num_lines = 0
        """Lines that ever began."""
        self._num_changes = 0
        """Changes since `_sizes` was measured."""
        self._sizes: dict[str, tuple[int, int]] = {}
        self._items, self._tokens = _Sizes(), _Sizes()
        self._entered: dict[Item, tuple[str, int, int]] = {}
        """Tenant of each item, and the number and tokens of items that entered its line before."""
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._entered)

    @property
    def tokens(self) -> int:
        """Tokens of all waiting items."""
        return sum(line.tokens for line in self._lines.values())

    def num_items(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.items)

    def put(self, item: Item, *, tenant: str, tokens: int) -> None:
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._clock)
            heappush(self._order, (self._clock, self._num_lines, tenant))
            self._num_lines += 1
        self._num_changes += 1
        self._entered[item] = (tenant, line.num_in, line.tokens_in)
        line.items.append((item, tokens))
        line.num_in += 1
        line.tokens_in += tokens

    def take(self) -> Item | None:
        """Take the next item; None if the queue is empty."""
        item = self.head()
        if item is not None:
            self._pop()
            del self._entered[item]
        return item

    def head(self) -> Item | None:
        """Return the item that `take` would give."""
        while self._order:
            tenant = self._order[0][2]
            line = self._lines[tenant]
            if not line.items:
                # Its advance payment is dropped: the clocks of the others are behind its own.
                heappop(self._order)
                del self._lines[tenant]
                continue
            item, _ = line.items[0]
            if item in self._entered:
                return item
            self._pop()
        return None

    def _pop(self) -> None:
        _, age, tenant = self._order[0]
        line = self._lines[tenant]
        self._clock = line.clock
        _, tokens = line.items.popleft()
        line.clock += tokens
        line.tokens_out += tokens
        line.num_out += 1
        heapreplace(self._order, (line.clock, age, tenant))
        self._num_changes += 1

    def remove(self, item: Item) -> bool:
        """Remove an item; False if it is not waiting. Its tenant pays for it anyway."""
        return self._entered.pop(item, None) is not None

    def place(self, item: Item) -> QueuePlace | None:
        """Estimate an item's position, as if all tenants took turns. None if it is not waiting."""
        entered = self._entered.get(item)
        if entered is None:
            return None
        tenant, number, tokens_before = entered
        line = self._lines[tenant]
        ahead, tokens = number - line.num_out, tokens_before - line.tokens_out
        self._measure_sizes()
        own_items, own_tokens = self._sizes.get(tenant, (0, 0))
        others = self._items.total(ahead + 1) - min(own_items, ahead + 1)
        tokens_of_others = self._tokens.total(tokens + 1) - min(own_tokens, tokens + 1)
        return QueuePlace(ahead=ahead + others, tokens_ahead=tokens + tokens_of_others)

    def _measure_sizes(self) -> None:
        if self._num_changes > len(self._sizes) // _CHANGES_PER_LINE:
            self._sizes = {
                name: (len(line.items), line.tokens) for name, line in self._lines.items()
            }
            self._items = _Sizes(size for size, _ in self._sizes.values())
            self._tokens = _Sizes(size for _, size in self._sizes.values())
            self._num_changes = 0


# A semaphore of limited width, fair between tenants by tokens.
#
#     async with turns.take("ada", tokens=200, width=4, id="req-1"): ...      # four samples at once
#
# A turn wider than the whole width runs when nothing else does.


Answer = TypeVar("Answer")
READERS = 2
"""Number of large bodies read or written at a time: other threads wait for the disk."""


class FairSemaphore:
    """Wakes waiting callers in fair order, as soon as enough width is free."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._used = 0
        # Filled by `take`, drained when a turn ends or begins; bounded by the limits on requests.
        self._queue: FairQueue[str] = FairQueue()
        self._waiting: dict[str, tuple[asyncio.Future[None], int]] = {}
        self._numbers = itertools.count()
        self._next: str | None = None
        """Id of the turn that left the queue and waits for enough width."""

    @asynccontextmanager
    async def take(
        self, tenant: str, *, tokens: int, width: int, id: str = ""
    ) -> AsyncIterator[None]:
        """Wait for a turn, which lasts for the block. `place` finds it by its id."""
        id = id or f"turn-{next(self._numbers)}"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = (turn, width)
        self._queue.put(id, tenant=tenant, tokens=tokens)
        self._wake()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._used -= width
            else:  # cancelled while it waited
                self._waiting.pop(id, None)
                self._queue.remove(id)
                self._next = None if self._next == id else self._next
            self._wake()

    async def in_thread(self, tenant: str, call: Callable[[], Answer], *, tokens: int) -> Answer:
        """Run a function in a thread, in turn. A cancelled caller waits for its end."""
        async with self.take(tenant, tokens=tokens, width=1):
            return await run_in_thread(call)

    def place(self, id: str) -> QueuePlace | None:
        """Return the position in the queue; None once it has its turn."""
        if id == self._next:
            return QueuePlace(0, 0)
        place = self._queue.place(id)
        if place is None:
            return None
        return QueuePlace(place.ahead + (self._next is not None), place.tokens_ahead)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_waiting_of(self, tenant: str) -> int:
        return self._queue.num_items(tenant)

    @property
    def tokens_waiting(self) -> int:
        return self._queue.tokens

    def _wake(self) -> None:
        while True:
            self._next = self._next or self._queue.take()
            if self._next is None:
                return
            turn, width = self._waiting[self._next]
            if turn.cancelled():  # its caller has not run since, and cleans up when it does
                self._next = None
                continue
            if self._used and self._used + width > self._width:
                return
            del self._waiting[self._next]
            self._next = None
            self._used += width
            turn.set_result(None)
