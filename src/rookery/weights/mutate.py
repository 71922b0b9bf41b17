"""Mutation on two levels: whether a candidate changes, and which of its numbers do.

    mutation = mutate(adapter, method=GaussianConfig(gene_rate=0.1), key=(seed, generation, child))
    mutation.adapter, mutation.sigma, mutation.is_mutated

`sigma` is the candidate's own strength: it changes, and is inherited, where children are planned
(`search.children.SigmaConfig`). A `sigma` of the method is used instead, for all candidates alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.delta import singular
from rookery.weights.draws import bernoulli_positions, normal
from rookery.weights.version import make_adapter

__all__ = ["GaussianConfig", "MutateConfig", "Mutation", "SvdConfig", "mutate"]


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


class SvdConfig(Config):
    """Change delta W along its own singular directions: its rank and its subspaces stay."""

    type: Literal["svd"] = "svd"
    candidate_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that a candidate is changed at all."""
    gene_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that one layer of a changed candidate is changed."""
    sigma: float | None = Field(default=None, ge=0)
    """Size of the change, of the log of each singular value and of each rotation in radians, for
    every candidate; null takes the candidate's own."""
    mode: Literal["values", "rotation", "both"] = "both"
    """values: stretch the directions. rotation: turn which input direction goes to which output."""


MutateConfig = Annotated[GaussianConfig | SvdConfig, Field(discriminator="type")]

_SIGMA = 0.1
"""The strength where neither the method nor the candidate has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What came of one candidate. When `is_mutated` is false the adapter is the one given."""

    adapter: Adapter
    sigma: float
    is_mutated: bool


def mutate(
    adapter: Adapter, *, method: MutateConfig, key: Key, sigma: float | None = None
) -> Mutation:
    """The candidate changed, or left alone by the coin of `candidate_rate`.

    Every layer draws from its own stream: the change of one does not depend on the others.
    """
    strength = next((own for own in (method.sigma, sigma) if own is not None), _SIGMA)
    if bulk_stream("mutate", *key).random() >= method.candidate_rate:
        return Mutation(adapter=adapter, sigma=strength, is_mutated=False)
    change = _CHANGES[method.type]
    factors = {
        layer: change(method, lora, strength, bulk_stream("mutate", layer, *key))
        for layer, lora in adapter.factors.items()
    }
    changed = make_adapter(adapter.name, base=adapter.base, factors=factors)
    return Mutation(adapter=changed, sigma=strength, is_mutated=True)


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


def _svd(
    method: SvdConfig, lora: LoraFactors, sigma: float, rng: np.random.Generator
) -> LoraFactors:
    if rng.random() >= method.gene_rate:
        return lora
    rank = lora.a.shape[0]
    u, s, vh = singular(lora.a.detach().float().cpu(), lora.b.detach().float().cpu())
    core = s
    if method.mode in ("values", "both"):
        core = s * torch.exp(sigma * normal(rng, s.shape))
    root = core.sqrt()
    a, b = root.unsqueeze(-1) * vh, u * root
    if method.mode in ("rotation", "both"):
        # Both turns stay within the subspaces: the singular values do not change.
        b = (u @ _rotation(len(s), sigma, rng)) * root
        a = root.unsqueeze(-1) * (_rotation(len(s), sigma, rng) @ vh)
    missing = rank - len(s)
    a = torch.nn.functional.pad(a, (0, 0, 0, missing))
    b = torch.nn.functional.pad(b, (0, missing))
    return LoraFactors(
        a=a.to(lora.a.device, lora.a.dtype), b=b.to(lora.b.device, lora.b.dtype), scale=lora.scale
    )


def _rotation(size: int, sigma: float, rng: np.random.Generator) -> torch.Tensor:
    """A random rotation whose angle in each plane of two axes is about sigma."""
    noise = normal(rng, (size, size)) * sigma
    upper = torch.triu(noise, diagonal=1)
    rotation: torch.Tensor = torch.linalg.matrix_exp(upper - upper.T)
    return rotation


_CHANGES: Mapping[str, Callable[[Any, LoraFactors, float, np.random.Generator], LoraFactors]] = {
    "gaussian": _gaussian,
    "svd": _svd,
}
