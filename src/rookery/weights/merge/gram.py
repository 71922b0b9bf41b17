"""What a weighing operator may know of the parents at one place: its layer and their products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Gram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gram:
    """`products()` [n, n] are inner products of the n parents there, computed when asked for."""

    layer: str
    products: Callable[[], torch.Tensor]
