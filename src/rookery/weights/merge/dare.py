"""DARE: drop random entries of each parent, scale up what is left, add.

With density p an entry is kept with probability p and multiplied by 1 / p, so that on average
nothing changes: the mean over keys is the linear combination.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.draws import Key, stream
from rookery.weights.merge.blocks import BLOCK, Floats, blocks, each
from rookery.weights.merge.cross import Cross, Space, normalised
from rookery.weights.merge.rows import Rows

__all__ = ["DareConfig", "Mask", "dare"]

_NUM_DECISIONS = 1 << 16
"""Independent decisions drawn per parent and child. A longer row is covered by blocks that start at
random places of them: within a block all decisions are independent, and two entries of different
blocks share one with probability 3e-5. They stay in the cache, and drawing them is 5 % of merging
rows of 3 million numbers; drawing one for each number would triple the cost."""
_STEPS = 1 << 16
"""The probability is rounded to a 65536th, and the factor is the reciprocal of the rounded one."""


class DareConfig(Config):
    type: Literal["dare"] = "dare"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """The probability that an entry is kept."""
    normalise: bool = True
    """Divide the weights by their sum; false takes them as they are."""


class Mask:
    """Random factors for one parent of one child: `gain` / p with probability p, else 0."""

    def __init__(self, *, length: int, density: float, gain: float, key: Key) -> None:
        rng = stream("dare", *key)
        size = min(length, _NUM_DECISIONS)
        num_kept = round(density * _STEPS)
        words = rng.bit_generator.random_raw(-(-size // 4))
        is_kept = np.asarray(words, np.uint64).view(np.uint16)[:size] < num_kept
        self._factors: Floats = is_kept.astype(np.float32)
        self._factors *= np.float32(gain * _STEPS / num_kept)
        num_blocks = -(-length // BLOCK)
        self._starts: list[int] = (
            [index * BLOCK for index in range(num_blocks)]
            if size == length
            else rng.integers(0, size - BLOCK, size=num_blocks, endpoint=True).tolist()
        )

    def factors(self, begin: int, end: int) -> Floats:
        """The factors of one block as `blocks` cuts them."""
        start = self._starts[begin // BLOCK]
        return self._factors[start : start + end - begin]


def dare(method: DareConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Children of the rows [P, M] into `out` [C, M]."""
    values, children = rows.data.numpy(), out.numpy()
    length = values.shape[1]

    def make(child: int) -> None:
        cross = crosses[child]
        weights = normalised(cross) if method.normalise else cross.weights
        masks = [
            Mask(length=length, density=method.density, gain=gain, key=(rows.name, i, *cross.key))
            for i, gain in enumerate(weights)
        ]
        (first, mask), *others = zip(cross.parents, masks, strict=True)
        part = np.empty(BLOCK, np.float32)
        for begin, end in blocks(0, length):
            target, term = children[child, begin:end], part[: end - begin]
            np.multiply(values[first, begin:end], mask.factors(begin, end), out=target)
            for parent, other in others:
                np.multiply(values[parent, begin:end], other.factors(begin, end), out=term)
                np.add(target, term, out=target)

    each(make, range(len(crosses)))
