"""The k-th largest magnitude of a tensor, exact, without sorting it.

A sorted sample brackets the answer; one pass counts what lies above the bracket and collects what
lies inside, a few per cent; the answer is selected among those. Costs a few passes over memory,
where `torch.topk` sorts.
"""

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["kth_magnitude"]

_SMALL = 8192
"""Below this many numbers a plain selection is quicker than the bracket."""
_SAMPLE = 2048
"""Size of the sample: bracket of +-4 standard deviations, at most 9 % of the numbers."""


def kth_magnitude(values: torch.Tensor, *, k: int) -> float:
    """The smallest of the k largest |values|; infinity when k is 0."""
    flat: NDArray[np.float32] = values.detach().reshape(-1).numpy()
    if k <= 0:
        return float("inf")
    if flat.size <= _SMALL:
        return _select(np.abs(flat), k)
    low, high = _bracket(flat, k)
    magnitudes = np.abs(flat)
    reaches_low, reaches_high = magnitudes >= low, magnitudes >= high
    num_above = int(np.count_nonzero(reaches_high))
    inside = magnitudes[np.flatnonzero(reaches_low ^ reaches_high)]
    if num_above < k <= num_above + inside.size:
        return _select(inside, k - num_above)
    return _select(magnitudes, k)


def _select(magnitudes: NDArray[np.float32], k: int) -> float:
    place = magnitudes.size - k
    return float(np.partition(magnitudes, place)[place])


def _bracket(flat: NDArray[np.float32], k: int) -> tuple[np.float32, np.float32]:
    # An odd stride visits all columns of a matrix whose width is a power of two.
    stride = flat.size // _SAMPLE | 1
    sample = np.sort(np.abs(flat[::stride]))
    fraction = 1 - k / flat.size
    centre = fraction * sample.size
    margin = 4 * (sample.size * fraction * (1 - fraction)) ** 0.5 + 2
    low, high = int(centre - margin), int(centre + margin)
    return (
        sample[low] if low >= 0 else np.float32(0),
        sample[high] if high < sample.size else np.float32("inf"),
    )
