"""Gaussian noise named by a seed, for evolution strategies: replayed, never stored.

    nearby = perturb(adapter, seed=(7, step, member), sigma=0.01)
    moved = accumulate(adapter, seeds=seeds, amounts=[rate * u for u in utilities])

A member of the population is eight bytes of seed; its noise is drawn again when its utility is
known. Memory is one layer of noise at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rookery.errors import AdapterError
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.draws import normal
from rookery.weights.version import make_adapter

__all__ = ["accumulate", "perturb", "rounded", "spread", "unrounded"]


def perturb(adapter: Adapter, *, seed: Key, sigma: float) -> Adapter:
    """Every number of both factors plus sigma * eps(seed). Negative sigma is the mirrored member.

    The noise depends on the seed and the layer's name and shape alone, so that it is the same for
    every adapter of a layout.
    """
    return accumulate(adapter, seeds=[seed], amounts=[sigma])


def accumulate(adapter: Adapter, *, seeds: Sequence[Key], amounts: Sequence[float]) -> Adapter:
    """The adapter plus sum_i amounts[i] * eps(seeds[i]), summed in float32 in the given order."""
    return rounded(unrounded(adapter.factors, seeds=seeds, amounts=amounts), like=adapter)


def unrounded(
    factors: Mapping[str, LoraFactors], *, seeds: Sequence[Key], amounts: Sequence[float]
) -> dict[str, LoraFactors]:
    """The sum of `accumulate` in float32. Going on from it later gives the same bits as one sum."""
    if len(seeds) != len(amounts):
        raise AdapterError(
            f"Got {len(seeds)} seeds and {len(amounts)} amounts; give one amount per seed."
        )
    return {layer: _moved(layer, lora, seeds, amounts) for layer, lora in factors.items()}


def rounded(factors: Mapping[str, LoraFactors], *, like: Adapter) -> Adapter:
    """An adapter of these factors, in the dtypes, and with the name and base, of another."""
    cast = {
        layer: replace(lora, a=lora.a.to(like.factors[layer].a.dtype),
                       b=lora.b.to(like.factors[layer].b.dtype))
        for layer, lora in factors.items()
    }  # fmt: skip
    return make_adapter(like.name, base=like.base, factors=cast)


def _moved(
    layer: str, lora: LoraFactors, seeds: Sequence[Key], amounts: Sequence[float]
) -> LoraFactors:
    a = lora.a.detach().to(torch.float32, copy=True)
    b = lora.b.detach().to(torch.float32, copy=True)
    for seed, amount in zip(seeds, amounts, strict=True):
        if amount == 0:
            continue
        rng = bulk_stream("perturb", layer, *seed)
        a.add_(normal(rng, a.shape).to(a.device), alpha=amount)
        b.add_(normal(rng, b.shape).to(b.device), alpha=amount)
    return LoraFactors(a=a, b=b, scale=lora.scale)


def spread(adapter: Adapter) -> float:
    """Root mean square of all numbers of an adapter; 1 / 100 when they are all zero."""
    tensors = [t for f in adapter.factors.values() for t in (f.a, f.b)]
    total = sum(float(t.double().square().sum()) for t in tensors)
    size = sum(t.numel() for t in tensors)
    return float(torch.tensor(total / size).sqrt()) or 0.01
