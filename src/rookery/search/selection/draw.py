"""Drawing indices in proportion to weights: what the proportional rules share.

draw(np.array([0.0, 3.0, 1.0]), count=2, distinct=True, rng=rng)
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw"]


def draw(
    weights: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    order: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """`count` indices, each with probability proportional to its weight; one is above 0.

    Distinct draws take what is drawn out of the urn. Once only weights of 0 are left, the rest
    is taken in `order`, best first.
    """
    if not distinct:
        return [int(index) for index in _indices(weights, rng.random(count))]
    left = weights.copy()
    picked: list[int] = []
    while len(picked) < count and left.any():
        index = int(_indices(left, rng.random(1))[0])
        picked.append(index)
        left[index] = 0.0
    taken = set(picked)
    rest = [index for index in order if index not in taken]
    return picked + rest[: count - len(picked)]


def _indices(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    bounds = np.cumsum(weights)
    indices: NDArray[np.int64] = np.searchsorted(bounds, uniform * bounds[-1], side="right")
    # A product rounded up to the total would fall behind the last candidate with weight.
    indices = np.minimum(indices, np.flatnonzero(weights)[-1])
    return indices
