"""Counter-based randomness: every draw belongs to a tuple of keys, none to a global generator.

    rng = stream(seed, "mutation", generation, candidate_id)
    torch_seed = stream_seed(seed, "noise", generation, 7)
    noise = bulk_stream("perturb", layer, seed).standard_normal(1_000_000)

The same keys give the same draws on any machine, in any order and in any process, so a result
does not depend on how many workers made it nor on where a run was resumed. Keys are hashed to 128
bits: a `torch.Generator` on the CPU keeps only 32 bits of its seed and repeats itself after some
ten thousand keys.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np

__all__ = ["Key", "bulk_stream", "shuffled", "stream", "stream_seed"]

Item = TypeVar("Item")

Key = tuple[int | str, ...]
"""Key of one draw, for example (seed, generation, child)."""


def stream(seed: int, *keys: int | str) -> np.random.Generator:
    """The Philox generator of (seed, *keys). 1 and "1" are different keys.

    >>> stream(0, "a", 1).integers(1000) == stream(0, "a", 1).integers(1000)
    True
    """
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(seed, keys), "little")))


def bulk_stream(*key: int | str) -> np.random.Generator:
    """The SFC64 generator of a key: faster than `stream` for millions of numbers, such as weights.
    Its numbers differ from those of `stream` with the same key."""
    text = repr([part if isinstance(part, str) else int(part) for part in key])
    digest = blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def stream_seed(seed: int, *keys: int | str) -> int:
    """A seed of 63 bits for a generator elsewhere (torch, an inference server)."""
    return int.from_bytes(_digest(seed, keys)[:8], "little") >> 1


def shuffled(items: Sequence[Item], *, rng: np.random.Generator) -> tuple[Item, ...]:
    """The items in a uniformly random order."""
    return tuple(items[int(index)] for index in rng.permutation(len(items)))


def _digest(seed: int, keys: tuple[int | str, ...]) -> bytes:
    """Hash to 16 bytes, one Philox key. Tags and lengths keep ("ab",) apart from ("a", "b")."""
    state = blake2b(digest_size=16, person=b"rookery-stream")
    for part in (seed, *keys):
        text = part.encode() if isinstance(part, str) else str(int(part)).encode()
        tag = b"s" if isinstance(part, str) else b"i"
        state.update(tag + len(text).to_bytes(8, "little") + text)
    return state.digest()
