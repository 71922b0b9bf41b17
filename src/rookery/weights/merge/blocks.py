"""Long rows in blocks that fit the cache, and several rows at once on the cores there are."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["BLOCK", "ahead", "blocks", "each"]

Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 32768
"""Numbers per block: 128 KiB, so that the half dozen blocks of an operator stay in the cache of one
core. Twice as many fall out of it; with half as many the cost of the calls shows."""


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive blocks; the same whatever the number of threads."""
    for begin in range(start, stop, BLOCK):
        yield begin, min(begin + BLOCK, stop)


def each(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results in order, computed by as many threads as torch may use."""
    num_threads = min(torch.get_num_threads(), len(items))
    if num_threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


def ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, num: int
) -> Iterator[tuple[Item, Result]]:
    """Items with their results, in order. Other threads are at work on the next `num` of them."""
    if num == 0:
        yield from ((item, function(item)) for item in items)
        return
    begun: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(num) as pool:
        for item in items:
            begun.append((item, pool.submit(function, item)))
            if len(begun) > num:
                first, result = begun.popleft()
                yield first, result.result()
        for last, result in begun:
            yield last, result.result()
