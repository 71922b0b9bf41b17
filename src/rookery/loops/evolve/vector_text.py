"""A vector as text, exact to 32 bits, so that an event of a run can hold it.

    text = pack_vector((0.25, -1.5))
    unpack_vector(text)                 # (0.25, -1.5)

Four bytes a number, then base64: 1,536 numbers are 8 KiB, a quarter of what JSON takes.
"""

import base64
from collections.abc import Sequence

import numpy as np

__all__ = ["pack_vector", "unpack_vector"]

_DTYPE = np.dtype("<f4")


def pack_vector(vector: Sequence[float]) -> str:
    """The text. ValueError when it has no direction: no numbers, all 0, or not finite."""
    with np.errstate(over="ignore"):
        numbers = np.array(vector, dtype=_DTYPE)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or not numbers.any():
        raise ValueError(
            f"Got a vector of shape {numbers.shape} without a direction: it needs finite numbers "
            "that are not all 0."
        )
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def unpack_vector(text: str) -> tuple[float, ...]:
    """The numbers of a packed vector."""
    return tuple(np.frombuffer(base64.b64decode(text), dtype=_DTYPE).tolist())
