"""Adapters to start from when there are none: zero and random ones, distinct for each seed.

layout = Layout(base="smollm2", layers=layers, rank=8, scale=2.0)
founders = [random_adapter(layout, name=f"r{i}", seed=(7, i)) for i in range(16)]
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.folder import make_adapter
from rookery.weights.stack import LayerShape, Layout

__all__ = [
    "bernoulli_positions",
    "normal",
    "random_adapter",
    "zero_adapter",
]

# Draws for weights: normal numbers, and the places of rare coins.
#
# normal(bulk_stream("init", layer, seed), [16, 576])


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
    batches, last = [], -1
    while last < num_places:
        expected = (num_places - last) * rate
        gaps = rng.geometric(rate, size=int(expected + 4 * expected**0.5) + 8)
        places = last + np.cumsum(gaps, dtype=np.int64)
        batches.append(places)
        last = int(places[-1])
    places = np.concatenate(batches)
    return places[: int(np.searchsorted(places, num_places))]


def zero_adapter(layout: Layout, *, name: str, seed: Key) -> Adapter:
    """delta W = 0: b is zero, a is drawn as PEFT draws it, uniform within 1 / sqrt(in).

    Were both factors zero, no small change of either could move the product away from zero.
    """
    return _draw(layout, name=name, seed=seed, size=0.0)


def random_adapter(layout: Layout, *, name: str, seed: Key, size: float = 1e-3) -> Adapter:
    """A small random delta W whose entries have standard deviation `size`.

    Weights of a language model have a standard deviation of 0.02 to 0.1: the default is felt and
    does no harm.
    """
    return _draw(layout, name=name, seed=seed, size=size)


def _draw(layout: Layout, *, name: str, seed: Key, size: float) -> Adapter:
    factors = {layer.name: _factors(layout, layer, seed, size) for layer in layout.layers}
    return make_adapter(name, base=layout.base, factors=factors)


def _factors(layout: Layout, layer: LayerShape, seed: Key, size: float) -> LoraFactors:
    rng = bulk_stream("init", layer.name, *seed)
    bound = 1 / sqrt(layer.num_in)
    uniform = torch.from_numpy(rng.random((layout.rank, layer.num_in), dtype="float32"))
    a = (uniform * 2 - 1) * bound
    # Var(delta) = scale^2 * rank * Var(a) * Var(b), and Var(a) = bound^2 / 3.
    spread = size / (layout.scale * bound * sqrt(layout.rank / 3))
    b = normal(rng, (layer.num_out, layout.rank)) * spread
    return LoraFactors(a=a.to(layout.dtype), b=b.to(layout.dtype), scale=layout.scale)
