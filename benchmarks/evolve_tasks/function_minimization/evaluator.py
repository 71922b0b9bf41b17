"""Scores a search by the values that it reaches on functions with many local minima.

The lowest value of each is 0, at a random point. The program has random numbers of its own, from
`random` and from numpy, the same in each evaluation.
"""

import math
import random
import runpy
from collections.abc import Callable

import numpy as np

NUM_FUNCTIONS = 20
NUM_CALLS = 100
LOW, HIGH = -5.0, 5.0


class TooManyCalls(ValueError):
    """The program exceeded its number of calls."""


def make_function(number: int) -> Callable[[float, float], float]:
    """Make a bowl with ripples around a random point."""
    rng = random.Random(f"function {number}")
    a, b = rng.uniform(-3.5, 3.5), rng.uniform(-3.5, 3.5)

    def function(x: float, y: float) -> float:
        dx, dy = float(x) - a, float(y) - b
        return 0.2 * (dx * dx + dy * dy) + 2 - math.cos(3 * dx) - math.cos(2 * dy + dx)

    return function


def lowest_found(search: Callable[..., tuple[float, float]], number: int) -> float:
    """Value at the point that the program returns."""
    function, num_left = make_function(number), NUM_CALLS

    def counted(x: float, y: float) -> float:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise TooManyCalls(f"more than {NUM_CALLS} calls")
        return function(x, y)

    random.seed(f"program {number}")
    np.random.seed(number)
    x, y = search(counted, LOW, HIGH, NUM_CALLS)
    if not (LOW <= x <= HIGH and LOW <= y <= HIGH):
        raise ValueError(f"the point ({x}, {y}) is outside of the square")
    return function(x, y)


def evaluate(program_path: str) -> dict[str, float]:
    search = runpy.run_path(program_path)["search"]
    values = [lowest_found(search, number) for number in range(NUM_FUNCTIONS)]
    scores = [1 / (1 + value) for value in values]
    return {
        "combined_score": sum(scores) / NUM_FUNCTIONS,
        "mean_value": sum(values) / NUM_FUNCTIONS,
    }
