"""Long rows in blocks that fit the cache, and several rows at once on the cores there are."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["BLOCK", "blocks", "each"]

Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 32768
"""Numbers per block: 128 KiB, so that the half dozen blocks of an operator stay in the cache of one
core. Twice as many fall out of it; with half as many the cost of the calls shows."""


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive blocks; the same whatever the number of threads."""
    for begin in range(start, stop, BLOCK):
        yield begin, min(begin + BLOCK, stop)


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int | None = None
) -> list[Result]:
    """The results in order, computed by as many threads as torch may use, or by fewer."""
    num_threads = min(num_threads or torch.get_num_threads(), len(items))
    if num_threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))
