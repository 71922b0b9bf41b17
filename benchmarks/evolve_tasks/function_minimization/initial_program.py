"""Looks for the lowest point of a function of two variables: at random."""

import random
from collections.abc import Callable


# EVOLVE-BLOCK-START
def search(
    function: Callable[[float, float], float], low: float, high: float, num_calls: int
) -> tuple[float, float]:
    """The best point of the square from `low` to `high`, after at most `num_calls` calls."""
    best, lowest = (0.0, 0.0), float("inf")
    for _ in range(num_calls):
        x, y = random.uniform(low, high), random.uniform(low, high)
        value = function(x, y)
        if value < lowest:
            best, lowest = (x, y), value
    return best


# EVOLVE-BLOCK-END
