"""Ranks of values with ties shared: what rank selection, ES utilities and CMA-ES have in common.

tied_ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["tied_ranks"]


def tied_ranks(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for the smallest to n - 1 for the largest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    last = np.cumsum(counts) - 1
    means: NDArray[np.float64] = last - (counts - 1) / 2.0
    return means[inverse]
