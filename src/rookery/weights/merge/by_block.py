"""Sums of adapters with coefficients of their own for every block of the model.

blocks = block_names(parents)                            # ("model.layers.28", ...)
merge_by_block(parents, weights=[...], rank=8)           # block by block, a weight per parent
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights.folder import make_adapter
from rookery.weights.merge.children import merge
from rookery.weights.merge.linear import LinearConfig, block_of

__all__ = ["adapted_blocks", "block_names", "merge_by_block"]

_SUM = LinearConfig(normalise=False)


def block_names(parents: Sequence[Adapter]) -> tuple[str, ...]:
    """The blocks that any of them adapts, in the order of the model."""
    names = {block_of(layer) for parent in parents for layer in parent.factors}
    return tuple(sorted(names, key=_in_order))


def adapted_blocks(parents: Sequence[Adapter]) -> tuple[bool, ...]:
    """Of every block whether each of them changes it, in the order of the weights of a merge."""
    blocks = [
        {block_of(layer) for layer, own in parent.factors.items() if own.a.any() and own.b.any()}
        for parent in parents
    ]
    return tuple(name in own for name in block_names(parents) for own in blocks)


def merge_by_block(
    parents: Sequence[Adapter],
    *,
    weights: Sequence[float],
    rank: int,
    device: torch.device | str = "cpu",
) -> Adapter:
    """Their weighted sum, named "child". The first weights, one each, are of the first block."""
    names, count = block_names(parents), len(parents)
    if len(weights) != len(names) * count:
        raise AdapterError(
            f"There are {len(weights)} weights for {count} adapters of {len(names)} blocks: give "
            f"{len(names) * count}."
        )
    factors: dict[str, LoraFactors] = {}
    for place, name in enumerate(names):
        own = weights[place * count : (place + 1) * count]
        parts = [(_part(parent, name), weight) for parent, weight in zip(parents, own, strict=True)]
        parts = [(part, weight) for part, weight in parts if part.factors]
        child = merge(
            [part for part, _ in parts],
            weights=[weight for _, weight in parts],
            method=_SUM,
            rank=rank,
            device=device,
        )
        factors |= child.factors
    return make_adapter("child", base=parents[0].base, factors=factors)


def _part(parent: Adapter, block: str) -> Adapter:
    """What the adapter changes of one block."""
    return replace(
        parent, factors={k: own for k, own in parent.factors.items() if block_of(k) == block}
    )


def _in_order(name: str) -> list[tuple[int, str]]:
    """By number where there is one: layer 9 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
