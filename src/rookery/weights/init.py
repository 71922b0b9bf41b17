"""Adapters to start from when there are none: zero and random ones, distinct for each seed.

layout = Layout(base="smollm2", layers=layers, rank=8, scale=2.0)
founders = [random_adapter(layout, name=f"r{i}", seed=(7, i)) for i in range(16)]
"""

from math import sqrt

import torch

from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.draws import normal
from rookery.weights.stack import LayerShape, Layout
from rookery.weights.version import make_adapter

__all__ = ["random_adapter", "zero_adapter"]


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
