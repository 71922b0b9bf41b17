"""Members of a population: a centre plus noise from a seed, computed only where needed.

    population = StepPopulation.around(centre, like=adapter, rank=1)
    member = population.member("e003-p05-pos", seed=4711, amount=0.01)     # an Adapter
    member.factors["model.layers.0.self_attn.q_proj"]                      # made now, all layers

A member is an ordinary adapter: reading its factors computes its tensors. Servers that Rookery
starts get its seed instead, and compute the same bits in their slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from rookery.fleet.vllm_plugin.population import LayerNoise, draws, perturbed
from rookery.types import Adapter, LoraFactors

if TYPE_CHECKING:
    import torch

__all__ = ["PerturbedFactors", "StepPopulation", "moved"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPopulation:
    """Parts that all members of one step share."""

    centre: Adapter
    """Adapter with float32 factors."""
    dtypes: Mapping[str, tuple["torch.dtype", "torch.dtype"]]
    """Dtypes of A and B of every layer, to which members are rounded."""
    noise: LayerNoise
    """Noise for the layers of `dtypes`, in order; a server may know them by other names."""
    version: str
    """Digest of centre, rank and dtypes; a member's version adds its seed and amount."""

    @classmethod
    def around(cls, centre: Adapter, *, like: Adapter, rank: int) -> "StepPopulation":
        """Make a population in the dtypes of `like`, with noise of this rank in each factor."""
        dtypes = {
            layer: (like.factors[layer].a.dtype, like.factors[layer].b.dtype)
            for layer in centre.factors
        }
        version = _digest(centre.version, str(rank), repr(list(dtypes.values())))
        noise = _noise(centre.factors, rank=rank)
        return cls(centre=centre, dtypes=dtypes, noise=noise, version=version)

    def member(self, name: str, *, seed: int, amount: float) -> Adapter:
        """Return centre + amount * noise(seed). Equal seeds and amounts give equal versions."""
        return Adapter(
            name=name,
            base=self.centre.base,
            factors=PerturbedFactors(self, seed=seed, amount=amount),
            version=_digest(self.version, str(seed), float(amount).hex()),
        )

    def fitted(self, centre: Adapter) -> "StepPopulation":
        """Return the same population around `centre`, whose layers have the servers' names."""
        dtypes = dict(zip(centre.factors, self.dtypes.values(), strict=True))
        return replace(self, centre=centre, dtypes=dtypes)


class PerturbedFactors(Mapping[str, LoraFactors]):
    """Factors of one member, computed when the first of them is read."""

    def __init__(self, population: StepPopulation, *, seed: int, amount: float) -> None:
        self.population, self.seed, self.amount = population, seed, amount
        self._made: dict[str, LoraFactors] | None = None

    @property
    def is_made(self) -> bool:
        """True if its tensors exist in this process."""
        return self._made is not None

    def __len__(self) -> int:
        return len(self.population.dtypes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.population.dtypes)

    def __getitem__(self, layer: str) -> LoraFactors:
        if self._made is None:
            self._made = self._make()
        return self._made[layer]

    def _make(self) -> dict[str, LoraFactors]:
        population, factors = self.population, self.population.centre.factors
        numbers = [(factors[layer].a, factors[layer].b) for layer in population.dtypes]
        [(_, drawn, amounts)] = draws(population.noise, [self.seed], [self.amount], "cpu")
        made = perturbed(numbers, population.noise, drawn, amounts)
        return {
            layer: LoraFactors(a=a[0].to(kind_a), b=b[0].to(kind_b), scale=factors[layer].scale)
            for (layer, (kind_a, kind_b)), (a, b) in zip(
                population.dtypes.items(), made, strict=True
            )
        }


def moved(
    factors: Mapping[str, LoraFactors],
    *,
    seeds: Sequence[int],
    amounts: Sequence[float],
    rank: int,
    device: str = "cpu",
) -> dict[str, LoraFactors]:
    """Return factors + sum_i amounts[i] * noise(seeds[i]) in float32, without making members."""
    import torch

    noise = _noise(factors, rank=rank)
    before = [factor for lora in factors.values() for factor in (lora.a, lora.b)]
    flat = [factor.detach().to(device, torch.float32).reshape(-1) for factor in before]
    total = torch.cat(flat)
    used = [(seed, amount) for seed, amount in zip(seeds, amounts, strict=True) if amount]
    for _, drawn, weights in draws(noise, [s for s, _ in used], [a for _, a in used], device):
        total.add_(noise.summed(drawn, weights))
    parts = torch.split(total.cpu(), [factor.numel() for factor in before])
    after = iter([part.view_as(factor) for part, factor in zip(parts, before, strict=True)])
    return {
        layer: LoraFactors(a=next(after), b=next(after), scale=lora.scale)
        for layer, lora in factors.items()
    }


def _noise(factors: Mapping[str, LoraFactors], *, rank: int) -> LayerNoise:
    layers = [
        (layer, lora.a.shape[0], lora.a.shape[1], lora.b.shape[0])
        for layer, lora in factors.items()
    ]
    return LayerNoise(layers, rank=rank)


def _digest(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
