"""Sequential tests side by side: is the mean of a finite list above a value? Look at any time.

    tests = MeanTests((num_pairs,), size=200, null=0.0, limits=(-1.0, 1.0), alpha=0.001)
    tests.see(values_K_N, first=0, where=(rows,))     # the next K values of the tests in `rows`
    tests.is_proven, tests.is_certain

**The test.** The `size` values are drawn in random order, without replacement, none below the first
of `limits`, low. If their mean is at most `null`, then after t of them, with sum S, the next has
mean at most m = (size * null - S) / (size - t). A gambler who stakes the share f of her wealth on
"more than m" multiplies it by 1 + f (x - m) / (m - low) each time; under that hypothesis her wealth
ever reaches 1 / alpha with probability at most alpha (Ville). `STAKES` are played side by side and
averaged. When S exceeds what the remaining values can take back the claim is certain: it needs no
chance.

The cost of a value is one multiplication per stake, whatever came before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rookery.errors import TaskError

__all__ = ["STAKES", "TOLERANCE", "MeanTests", "check_rewards", "two_sum"]

STAKES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Shares of the largest safe stake. The best one for a pair is (wins - losses) / (wins + losses)
of the tasks on which they differ; averaging over ten costs at most a factor 10 of wealth."""

TOLERANCE = 1e-9
"""Relative rounding allowance of sums of rewards: a lead must exceed it to be certain."""

_LOST = 1e-250
"""Wealth below this is lost for good: numbers near the smallest float are slow to compute with."""


class MeanTests:
    """Tests of one null, each with the values it has seen so far. Owned and changed by its maker.

    Proofs stay: a test that was proven once is proven, since the time of looking is free.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        size: int,
        null: float,
        limits: tuple[float, float],
        alpha: float,
    ) -> None:
        """`limits` are the smallest and the largest possible value."""
        self._size = size
        self._null = null
        self._low = limits[0]
        self._rounding = TOLERANCE * (limits[1] - limits[0]) / 2
        self._enough = 1.0 / alpha
        self.sums = np.zeros(shape)
        """Of the values seen."""
        self._wealth = np.ones((len(STAKES), *shape))
        self.is_proven = np.zeros(shape, dtype=bool)
        """The mean is above the null, at level alpha or for certain."""
        self.is_certain = np.zeros(shape, dtype=bool)

    def see(self, values: NDArray[np.float64], *, first: int, where: Any) -> None:
        """Play values [K, *selected] on the tests selected by `where`, an array of indices per
        dimension, all of which have seen exactly `first` values."""
        sums, wealth = self.sums[where], self._wealth[(slice(None), *where)]
        is_proven, is_certain = self.is_proven[where], self.is_certain[where]
        stakes = STAKES.reshape(-1, *[1] * sums.ndim)
        target = self._size * self._null
        factors = np.empty_like(wealth)
        with np.errstate(over="ignore", under="ignore"):
            for left, value in zip(range(self._size - first, 0, -1), values, strict=False):
                mean = (target - sums) / left
                room = mean - self._low
                # Where the hypothesis leaves no room to be wrong there is no stake to place.
                gain = np.where(
                    room > self._rounding, (value - mean) / np.maximum(room, self._rounding), 0.0
                )
                np.multiply(stakes, gain, out=factors)
                factors += 1.0
                wealth *= factors
                sums += value
                is_proven |= wealth.mean(axis=0) >= self._enough
                surplus = sums + self._low * (left - 1) - target
                is_certain |= surplus > self._rounding * self._size
        wealth[wealth < _LOST] = 0.0
        self.sums[where], self._wealth[(slice(None), *where)] = sums, wealth
        self.is_proven[where], self.is_certain[where] = is_proven | is_certain, is_certain

    def reset(self, where: Any) -> None:
        """Begin the selected tests again, with nothing seen."""
        self.sums[where], self._wealth[(slice(None), *where)] = 0.0, 1.0
        self.is_proven[where] = self.is_certain[where] = False


def two_sum(totals: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2, N]: the rounded sums of all values so far, and what rounding took away."""
    high, low = totals
    total = high + values
    back = total - high
    low = low + ((high - (total - back)) + (values - back))
    rounded = total + low
    return np.stack([rounded, low - (rounded - total)])


def check_rewards(
    values: NDArray[np.float64],
    *,
    id: str,
    tasks: Sequence[str],
    limits: tuple[float, float] | None,
) -> None:
    """TaskError unless all are finite and, where they are tested, within the limits."""
    is_wrong = ~np.isfinite(values)
    if limits is not None:
        is_wrong |= (values < limits[0]) | (values > limits[1])
    if not is_wrong.any():
        return
    place = int(np.argmax(is_wrong))
    what = f"The reward of {id} on the task {tasks[place]} is {values[place]}"
    if limits is None or not np.isfinite(values[place]):
        raise TaskError(f"{what}: a reward is a finite number.")
    raise TaskError(
        f"{what}, outside {limits[0]} to {limits[1]}, within which candidates are raced: write "
        "the smallest and the largest reward the scorer can give as race.low and race.high, or "
        "race: {enabled: false}, which needs neither."
    )
