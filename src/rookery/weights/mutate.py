"""Gaussian mutation of adapters, and noise from seeds for evolution strategies.

    mutation = mutate(adapter, method=GaussianConfig(gene_rate=0.1), key=(seed, generation, child))
    mutation.adapter, mutation.sigma

`sigma` is the candidate's own noise strength, which children inherit with changes
(`search.children.SigmaConfig`). If the method has a `sigma`, it applies to all candidates instead.
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

# For evolution strategies, a seed names Gaussian noise, which is drawn again and never stored:
#
#     nearby = perturb(adapter, seed=(7, step, member), sigma=0.01)
#     moved = accumulate(adapter, seeds=seeds, amounts=[rate * u for u in utilities])
#
# Memory holds one layer's noise at a time.


def perturb(adapter: Adapter, *, seed: Key, sigma: float) -> Adapter:
    """Add sigma * eps(seed) to every number of both factors. Negative sigma gives the mirror image.

    The noise depends only on the seed and the layer's name and shape, not on the adapter.
    """
    return accumulate(adapter, seeds=[seed], amounts=[sigma])


def accumulate(adapter: Adapter, *, seeds: Sequence[Key], amounts: Sequence[float]) -> Adapter:
    """Add sum_i amounts[i] * eps(seeds[i]), in float32 and in the given order."""
    return rounded(unrounded(adapter.factors, seeds=seeds, amounts=amounts), like=adapter)


def unrounded(
    factors: Mapping[str, LoraFactors], *, seeds: Sequence[Key], amounts: Sequence[float]
) -> dict[str, LoraFactors]:
    """Return the sum of `accumulate` in float32. Continuing from it gives the bits of one sum."""
    if len(seeds) != len(amounts):
        raise AdapterError(
            f"Got {len(seeds)} seeds and {len(amounts)} amounts; give one amount per seed."
        )
    return {layer: _moved(layer, lora, seeds, amounts) for layer, lora in factors.items()}


def rounded(factors: Mapping[str, LoraFactors], *, like: Adapter) -> Adapter:
    """Make an adapter of these factors with the dtypes, name and base of `like`."""
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
    """Return the root mean square of an adapter's numbers; 0.01 if they are all zero."""
    tensors = [t for f in adapter.factors.values() for t in (f.a, f.b)]
    total = sum(float(t.double().square().sum()) for t in tensors)
    size = sum(t.numel() for t in tensors)
    return float(torch.tensor(total / size).sqrt()) or 0.01


class GaussianConfig(Config):
    """Add normal noise to a random fraction of the numbers of both factors."""

    type: Literal["gaussian"] = "gaussian"
    candidate_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that a candidate is changed at all."""
    gene_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that one number of a changed candidate is changed."""
    sigma: float | None = Field(default=None, ge=0)
    """Standard deviation of the noise for every candidate; null uses each candidate's own sigma."""
    relative: bool = True
    """Multiply sigma by the standard deviation of each tensor; false uses sigma unchanged."""


_SIGMA = 0.1
"""Default sigma if neither the method nor the candidate has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Result of a mutation: a new adapter, or the unchanged one, and the sigma used."""

    adapter: Adapter
    sigma: float


def mutate(
    adapter: Adapter, *, method: GaussianConfig, key: Key, sigma: float | None = None
) -> Mutation:
    """Mutate a candidate with probability `candidate_rate`.

    Every layer has its own random stream, so its change does not depend on other layers.
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
    """Return the root mean squares of a and b; an all-zero factor takes the other's.

    The b of a new adapter is zero, and noise relative to zero could never change it.
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
