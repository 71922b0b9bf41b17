"""Draws for weights: normal numbers, and the places of rare coins.

normal(bulk_stream("init", layer, seed), [16, 576])
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["bernoulli_positions", "normal"]


def normal(rng: np.random.Generator, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32 on the CPU, drawn by one thread: 8 ns a number."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


def bernoulli_positions(
    rng: np.random.Generator, *, num_places: int, rate: float
) -> NDArray[np.int64]:
    """The ascending places where independent coins of probability `rate` fall on heads.

    Only the heads are drawn: the gaps between them are geometric, so a rate of 0.01 costs a
    hundredth of a full mask.
    """
    if rate >= 1:
        return np.arange(num_places, dtype=np.int64)
    if rate <= 0 or num_places == 0:
        return np.empty(0, dtype=np.int64)
    found, last = [], -1
    while last < num_places:
        expected = (num_places - last) * rate
        gaps = rng.geometric(rate, size=int(expected + 4 * expected**0.5) + 8)
        places = last + np.cumsum(gaps, dtype=np.int64)
        found.append(places)
        last = int(places[-1])
    places = np.concatenate(found)
    return places[: int(np.searchsorted(places, num_places))]
