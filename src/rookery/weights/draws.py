"""Randomness from explicit keys: the same key gives the same bits, whoever draws and when.

    stream(seed, generation, child, "model.layers.0.mlp.up_proj").random()

There is no global generator and no order of calls to keep. Keys are hashed to 128 bits, because a
`torch.Generator` on the CPU keeps only 32 bits of its seed and repeats itself after some ten
thousand keys.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Key", "bernoulli_positions", "normal", "stream"]

Key = tuple[int | str, ...]
"""Names one draw, for example (seed, generation, child)."""


def stream(*key: int | str) -> np.random.Generator:
    """A generator of its own for this key. 1 and "1" are different parts of a key."""
    text = repr([part if isinstance(part, str) else int(part) for part in key])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


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
