"""Scores a program by how low a random search gets with its jumps, in 100 calls of a function.

`combined_score` guides the evolution, on 20 functions with many dips. The `held_out_...` metrics
use 60 other functions, which guide nothing: how much lower the search gets than with the initial
program's constant jumps of 10, and the 95 % interval of this gain.
"""

import math
import random
import runpy
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

CALLS = 100
SEEN, HELD_OUT = range(20), range(100, 160)
FIRST = [10.0] * CALLS


def bumpy(seed: int) -> Callable[[float, float], float]:
    """Make a bowl with dips; each seed has a different lowest point."""
    rng = random.Random(seed)
    a, b, c, d = (rng.uniform(-3, 3) for _ in range(4))

    def function(x: float, y: float) -> float:
        bowl = 0.3 * ((x - a) ** 2 + (y - b) ** 2)
        return bowl - math.cos(3 * (x - c)) - math.cos(3 * (y - d))

    return function


def lowest(jumps: Sequence[float], seed: int) -> float:
    """Return the lowest value that a search with these jumps finds."""
    function, rng = bumpy(seed), random.Random(seed)
    best = (0.0, 0.0)
    value = function(*best)
    for jump in jumps:
        x, y = (min(5.0, max(-5.0, at + jump * rng.uniform(-1, 1))) for at in best)
        if function(x, y) < value:
            best, value = (x, y), function(x, y)
    return value


def evaluate(program_path: str) -> dict[str, float]:
    jumps = [float(jump) for jump in runpy.run_path(program_path)["jumps"](CALLS)]
    if len(jumps) != CALLS:
        raise ValueError(f"jumps({CALLS}) gave {len(jumps)} numbers")
    gains = [lowest(FIRST, seed) - lowest(jumps, seed) for seed in HELD_OUT]
    half = 1.96 * stdev(gains) / math.sqrt(len(gains))
    return {
        "combined_score": -fmean(lowest(jumps, seed) for seed in SEEN),
        "held_out_gain": fmean(gains),
        "held_out_low": fmean(gains) - half,
        "held_out_high": fmean(gains) + half,
    }
