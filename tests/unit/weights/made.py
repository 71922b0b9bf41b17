"""Adapters and their dense deltas for the tests of the operators."""

from collections.abc import Mapping

import torch

from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter

SHAPES = {
    "model.layers.0.mlp.up_proj": (12, 20),
    "model.layers.0.self_attn.q_proj": (12, 12),
    "model.layers.1.self_attn.q_proj": (12, 12),
}


def made(
    seed: int,
    *,
    rank: int = 3,
    scale: float = 2.0,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    size: float = 1.0,
) -> Adapter:
    """Normal factors; `shapes` maps a layer to (in, out)."""
    rng = torch.Generator().manual_seed(seed)
    factors = {
        layer: LoraFactors(
            a=size * torch.randn(rank, num_in, generator=rng),
            b=size * torch.randn(num_out, rank, generator=rng),
            scale=scale,
        )
        for layer, (num_in, num_out) in shapes.items()
    }
    return make_adapter(f"made{seed}", base="tiny", factors=factors)


def dense(
    adapter: Adapter, *, shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> dict[str, torch.Tensor]:
    """delta W of every layer in float64, zero where the adapter has none."""
    found = {}
    for layer, (num_in, num_out) in shapes.items():
        lora = adapter.factors.get(layer)
        found[layer] = (
            lora.scale * lora.b.double() @ lora.a.double()
            if lora is not None
            else torch.zeros(num_out, num_in, dtype=torch.float64)
        )
    return found


def best_of_rank(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """The closest matrix of that rank, by a full SVD."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    best: torch.Tensor = (u[:, :rank] * s[:rank]) @ vh[:rank]
    return best
