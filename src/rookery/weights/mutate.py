"""Mutation on two levels: whether a candidate changes, and which of its numbers do.

    mutation = mutate(adapter, method=GaussianConfig(gene_rate=0.1), key=(seed, generation, child))
    mutation.adapter, mutation.sigma

`sigma` is the candidate's own strength: it changes, and is inherited, where children are planned
(`search.children.SigmaConfig`). A `sigma` of the method is used instead, for all candidates alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.errors import AdapterError
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.folder import make_adapter
from rookery.weights.stack import bernoulli_positions, normal

__all__ = [
    "GaussianConfig",
    "Mutation",
    "accumulate",
    "mutate",
    "perturb",
    "rounded",
    "spread",
    "unrounded",
]

# Gaussian noise named by a seed, for evolution strategies: replayed, never stored.
#
#     nearby = perturb(adapter, seed=(7, step, member), sigma=0.01)
#     moved = accumulate(adapter, seeds=seeds, amounts=[rate * u for u in utilities])
#
# A member of the population is eight bytes of seed; its noise is drawn again when its utility is
# known. Memory is one layer of noise at a time.


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


class GaussianConfig(Config):
    """Add normal noise to a random part of the numbers of both factors."""

    type: Literal["gaussian"] = "gaussian"
    candidate_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that a candidate is changed at all."""
    gene_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that one number of a changed candidate is changed."""
    sigma: float | None = Field(default=None, ge=0)
    """Standard deviation of the noise, for every candidate; null takes the candidate's own."""
    relative: bool = True
    """Count sigma in standard deviations of each tensor; false takes it as it is."""


_SIGMA = 0.1
"""The strength where neither the method nor the candidate has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What came of one candidate: another adapter, or the one given."""

    adapter: Adapter
    sigma: float


def mutate(
    adapter: Adapter, *, method: GaussianConfig, key: Key, sigma: float | None = None
) -> Mutation:
    """The candidate changed, or left alone by the coin of `candidate_rate`.

    Every layer draws from its own stream: the change of one does not depend on the others.
    """
    strength = next((chosen for chosen in (method.sigma, sigma) if chosen is not None), _SIGMA)
    if bulk_stream("mutate", *key).random() >= method.candidate_rate:
        return Mutation(adapter=adapter, sigma=strength)
    factors = {
        layer: _gaussian(method, lora, strength, bulk_stream("mutate", layer, *key))
        for layer, lora in adapter.factors.items()
    }
    changed = make_adapter(adapter.name, base=adapter.base, factors=factors)
    return Mutation(adapter=changed, sigma=strength)


def _gaussian(
    method: GaussianConfig, lora: LoraFactors, sigma: float, rng: np.random.Generator
) -> LoraFactors:
    spread_a, spread_b = _spreads(lora) if method.relative else (1.0, 1.0)
    return LoraFactors(
        a=_noisy(lora.a, sigma * spread_a, method.gene_rate, rng),
        b=_noisy(lora.b, sigma * spread_b, method.gene_rate, rng),
        scale=lora.scale,
    )


def _spreads(lora: LoraFactors) -> tuple[float, float]:
    """Standard deviations of a and b about zero; a factor that is all zero takes the other's.

    The b of a fresh adapter is zero: noise relative to its own spread could never move it.
    """
    fresh = 1 / sqrt(3 * lora.a.shape[1])
    spread_a = float(lora.a.detach().float().square().mean().sqrt())
    spread_b = float(lora.b.detach().float().square().mean().sqrt())
    return spread_a or spread_b or fresh, spread_b or spread_a or fresh


def _noisy(
    tensor: torch.Tensor, sigma: float, rate: float, rng: np.random.Generator
) -> torch.Tensor:
    changed = tensor.detach().to(torch.float32, copy=True)
    if rate >= 1:
        changed.add_(normal(rng, changed.shape).to(changed.device), alpha=sigma)
        return changed.to(tensor.dtype)
    places = torch.from_numpy(bernoulli_positions(rng, num_places=changed.numel(), rate=rate))
    noise = normal(rng, places.shape) * sigma
    flat = changed.reshape(-1)
    flat.index_add_(0, places.to(flat.device), noise.to(flat.device))
    return flat.view(tensor.shape).to(tensor.dtype)
