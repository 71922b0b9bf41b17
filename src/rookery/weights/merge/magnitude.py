"""The k-th largest magnitude of a tensor, exact, without sorting it.

A sample brackets the answer; one pass counts what lies above the bracket and collects what lies
inside, a few per cent; the answer is selected among those. `torch.topk` takes 40 times as long.
"""

import numpy as np

from rookery.weights.merge.blend import Floats

__all__ = ["kth_magnitude"]

_SMALL = 4096
"""Below this many numbers a plain selection is quicker than the bracket."""
_MARGIN = 3
"""Half width of the bracket in standard deviations of the sample's rank. One time in 400 the answer
lies outside and is selected among all."""


def kth_magnitude(values: Floats, *, k: int) -> np.float32:
    """The smallest of the k largest |values|; infinity when k is 0."""
    if k <= 0:
        return np.float32("inf")
    magnitudes = np.abs(values)
    if values.size <= _SMALL:
        return _select(magnitudes, k)
    low, high = _bracket(magnitudes, k)
    reaches_high = magnitudes >= high
    is_inside = magnitudes >= low
    is_inside ^= reaches_high
    num_above = int(np.count_nonzero(reaches_high))
    inside = magnitudes[np.flatnonzero(is_inside)]
    if num_above < k <= num_above + inside.size:
        return _select(inside, k - num_above)
    return _select(magnitudes, k)


def _select(magnitudes: Floats, k: int) -> np.float32:
    place = magnitudes.size - k
    chosen: np.float32 = np.partition(magnitudes, place)[place]
    return chosen


def _bracket(magnitudes: Floats, k: int) -> tuple[np.float32, np.float32]:
    # This sample size balances its own selection against that among the numbers inside. An odd
    # stride visits all columns of a matrix whose width is a power of two.
    sample = magnitudes[:: int(magnitudes.size ** (1 / 3) / 2) | 1]
    fraction = 1 - k / magnitudes.size
    centre = fraction * sample.size
    margin = _MARGIN * (sample.size * fraction * (1 - fraction)) ** 0.5 + 2
    low, high = max(0, int(centre - margin)), min(sample.size - 1, int(centre + margin))
    ordered = np.partition(sample, (low, high))
    return (
        ordered[low] if low > 0 else np.float32(0),
        ordered[high] if high < sample.size - 1 else np.float32("inf"),
    )
