"""Merge operators by name: linear, layerwise, DARE, TIES. The tables at the end list them.

LinearConfig()                    # divides the weights by their sum: an average
LinearConfig(normalise=False)     # keeps the weights: (1, 1) is the plain sum
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.seeding import Key, bulk_stream
from rookery.weights.merge.compiled import Blend, Drop, Floats, Integers, Trim, open_rows
from rookery.weights.merge.cross import (
    BLOCK,
    Cross,
    Rows,
    Space,
    blocks,
    each,
    normalised,
    shares,
)

__all__ = [
    "BLENDS",
    "WEIGHINGS",
    "DareConfig",
    "DareTiesConfig",
    "LayerwiseConfig",
    "LinearConfig",
    "MergeConfig",
    "TiesConfig",
    "block_of",
    "dare",
    "dare_ties",
    "is_dense",
    "layerwise",
    "linear",
    "ties",
]


class LinearConfig(Config):
    type: Literal["linear"] = "linear"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors separately."""
    normalise: bool = True
    """Divide the weights by their sum; false keeps them unchanged."""


def linear(method: LinearConfig, *, cross: Cross, layer: str) -> tuple[float, ...]:  # noqa: ARG001
    return normalised(cross) if method.normalise else cross.weights


_BLOCK = re.compile(r"^.*?\.\d+(?=\.)")


def block_of(layer: str) -> str:
    """Return the transformer block of a layer, "model.layers.3", or else the layer's own name."""
    block = _BLOCK.match(layer)
    return block[0] if block else layer


class LayerwiseConfig(Config):
    """Every block of the model takes one parent, or its own mixture of the parents."""

    type: Literal["layerwise"] = "layerwise"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors separately; equal if `mode` is pick."""
    mode: Literal["pick", "mix"] = "pick"
    """pick: one parent, with its weight as probability. mix: random coefficients of sum 1, larger
    on average for larger weights."""
    unit: Literal["block", "layer"] = "block"
    """Layers that share a draw: a transformer block ("model.layers.3"), or one linear layer."""


def layerwise(method: LayerwiseConfig, *, cross: Cross, layer: str) -> tuple[float, ...]:
    """Return coefficients of sum 1, equal for a and b and for all layers of a unit."""
    parts = shares(cross)
    unit = block_of(layer) if method.unit == "block" else layer
    rng = bulk_stream("layerwise", unit, *cross.key)
    if method.mode == "pick":
        chosen = int(rng.choice(len(parts), p=parts))
        return tuple(float(index == chosen) for index in range(len(parts)))
    # Exponential draws make equal weights uniform over all mixtures.
    drawn = [
        part * float(draw)
        for part, draw in zip(parts, rng.exponential(size=len(parts)), strict=True)
    ]
    return tuple(value / sum(drawn) for value in drawn)


_NUM_DECISIONS = 1 << 16
"""Independent keep-or-drop decisions drawn per parent and child. Longer rows are covered by blocks
that start at random positions of this table. Decisions are independent within a block, and entries
of different blocks share one with probability 3e-5. The table stays in the cache, and drawing it is
5 % of merging rows of 3 million numbers; a decision per number would triple the cost."""
_STEPS = 1 << 16
"""Probabilities are rounded to 1 / 65536; the factor is the reciprocal of the rounded one."""


class DareConfig(Config):
    """Drop random entries of each parent, scale up the rest, and add. An entry is kept with
    probability p and multiplied by 1 / p: the mean over keys is the linear combination."""

    type: Literal["dare"] = "dare"
    space: Space = "delta"
    """Combine delta W (dense, then truncated to the rank) or the two factors separately."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """Probability that an entry is kept."""
    normalise: bool = True
    """Divide the weights by their sum; false keeps them unchanged."""


def dare(method: DareConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Write the children of rows [P, M] to `out` [C, M]."""
    drop_rows(
        rows,
        crosses=crosses,
        density=method.density,
        gains=lambda cross: normalised(cross) if method.normalise else cross.weights,
        elect_by=lambda cross: None,  # noqa: ARG005
        out=out,
    )


def drop_rows(
    rows: Rows,
    *,
    crosses: Sequence[Cross],
    density: float,
    gains: Callable[[Cross], Sequence[float]],
    elect_by: Callable[[Cross], Sequence[float] | None],
    out: torch.Tensor,
) -> None:
    """Drop entries, multiply parents by their gains, then elect by `elect_by`, or add if None."""
    engine, values, children = open_rows(rows, out)
    bounds = np.array(list(blocks(0, values.shape[1])), np.int64).reshape(-1, 2)

    def make(child: int) -> None:
        cross = crosses[child]
        weights = elect_by(cross)
        drawn = [
            _draw(bounds, density=density, gain=gain, key=(rows.name, i, *cross.key))
            for i, gain in enumerate(gains(cross))
        ]
        engine.blend(
            Blend(
                rows=[values[parent] for parent in cross.parents],
                bounds=bounds,
                entries=Drop([table for table, _ in drawn], np.stack([at for _, at in drawn])),
                weights=None if weights is None else np.array(weights, np.float32),
                out=children[child],
            )
        )

    each(make, range(len(crosses)))


def _draw(bounds: Integers, *, density: float, gain: float, key: Key) -> tuple[Floats, Integers]:
    """Draw a parent's factors, `gain` / p with probability p, else 0, and each block's start."""
    rng = bulk_stream("dare", *key)
    length = int(bounds[-1, 1]) if len(bounds) else 0
    size = min(length, _NUM_DECISIONS)
    num_kept = round(density * _STEPS)
    words = rng.bit_generator.random_raw(-(-size // 4))
    is_kept = np.asarray(words, np.uint64).view(np.uint16)[:size] < num_kept
    factors: Floats = is_kept.astype(np.float32)
    factors *= np.float32(gain * _STEPS / num_kept)
    if size == length:
        return factors, bounds[:, 0]
    return factors, rng.integers(0, size - BLOCK, size=len(bounds), endpoint=True)


class TiesConfig(Config):
    """Trim parents to their largest entries, elect a sign per entry, average those that have it."""

    type: Literal["ties"] = "ties"
    space: Space = "delta"
    """Combine delta W (dense, then truncated to the rank) or the two factors separately."""
    density: float = Field(default=0.7, gt=0, le=1)
    """Fraction of each tensor's entries that is kept, largest magnitudes first."""


def ties(method: TiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Write the children of rows [P, M] to `out` [C, M]. Each parent's limits are computed once.

        merged = sum of w_i * t_i / sum of w_i, both over the parents with the elected sign

    t_i is a trimmed parent; the elected sign is that of sum w_i * t_i over all parents. Equal
    parents give the parent, because the weights are normalised only over those that take part.
    """
    engine, values, children = open_rows(rows, out)
    bounds = np.array([(piece.start, piece.stop) for piece in rows.pieces], np.int64)
    bounds = bounds.reshape(-1, 2)
    sizes = np.array([piece.sizes for piece in rows.pieces]).reshape(-1, len(values))
    counts = np.ascontiguousarray((method.density * sizes.T).astype(np.int64))
    used = sorted({parent for cross in crosses for parent in cross.parents})

    def find(row: int) -> Any:
        return engine.limits(values[row], bounds=bounds, counts=counts[row])

    limits = dict(zip(used, each(find, used), strict=True))

    def make(child: int) -> None:
        cross = crosses[child]
        engine.blend(
            Blend(
                rows=[values[parent] for parent in cross.parents],
                bounds=bounds,
                entries=Trim([limits[parent] for parent in cross.parents]),
                weights=np.array(shares(cross), np.float32),
                out=children[child],
            )
        )

    each(make, range(len(crosses)))


class DareTiesConfig(Config):
    """Drop random entries of each parent as in DARE, then elect signs as in TIES."""

    type: Literal["dare_ties"] = "dare_ties"
    space: Space = "delta"
    """Combine delta W (dense, then truncated to the rank) or the two factors separately."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """Probability that an entry is kept."""


def dare_ties(
    method: DareTiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor
) -> None:
    """Write the children of rows [P, M] to `out` [C, M]."""
    drop_rows(
        rows,
        crosses=crosses,
        density=method.density,
        gains=lambda cross: [1] * len(cross.parents),
        elect_by=shares,
        out=out,
    )


MergeConfig = Annotated[
    LinearConfig | TiesConfig | DareConfig | DareTiesConfig | LayerwiseConfig,
    Field(discriminator="type"),
]

WEIGHINGS: Mapping[str, Callable[..., tuple[float, ...]]] = {
    "linear": linear,
    "layerwise": layerwise,
}
"""Operators with one coefficient per parent and layer: exact at low rank."""

BLENDS: Mapping[str, Callable[..., None]] = {"ties": ties, "dare": dare, "dare_ties": dare_ties}
"""Entry-wise operators, whose results on delta W do not have low rank."""


def is_dense(method: MergeConfig) -> bool:
    """Return whether a method builds the dense delta W of every layer."""
    return method.space == "delta" and method.type in BLENDS
