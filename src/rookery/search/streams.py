"""Counter-based randomness: every draw belongs to a tuple of keys, none to a global generator.

    rng = stream(seed, "mutation", generation, candidate_id)
    torch_seed = stream_seed(seed, "noise", generation, 7)

The same keys give the same draws on any machine, in any order and in any process, so a result
does not depend on how many workers made it nor on where a run was resumed.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np

__all__ = ["shuffled", "stream", "stream_seed"]

Item = TypeVar("Item")


def stream(seed: int, *keys: int | str) -> np.random.Generator:
    """The Philox generator of (seed, *keys). 1 and "1" are different keys.

    >>> stream(0, "a", 1).integers(1000) == stream(0, "a", 1).integers(1000)
    True
    """
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(seed, keys), "little")))


def stream_seed(seed: int, *keys: int | str) -> int:
    """A seed of 63 bits for a generator elsewhere (torch, an inference server)."""
    return int.from_bytes(_digest(seed, keys)[:8], "little") >> 1


def shuffled(items: Sequence[Item], *, rng: np.random.Generator) -> tuple[Item, ...]:
    """The items in a uniformly random order."""
    return tuple(items[int(index)] for index in rng.permutation(len(items)))


def _digest(seed: int, keys: tuple[int | str, ...]) -> bytes:
    """16 bytes: one Philox key. Every part is tagged and ended, so ("ab",) is not ("a", "b")."""
    state = blake2b(digest_size=16, person=b"rookery-stream")
    for part in (seed, *keys):
        text = part.encode() if isinstance(part, str) else str(int(part)).encode()
        tag = b"s" if isinstance(part, str) else b"i"
        state.update(tag + len(text).to_bytes(8, "little") + text)
    return state.digest()
