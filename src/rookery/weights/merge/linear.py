"""Linear: the weighted sum of the parents. With equal weights the uniform average.

LinearConfig()                    # weights are divided by their sum: an average
LinearConfig(normalise=False)     # weights as they are: weights (1, 1) are the plain sum
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import acos, sin
from typing import ClassVar, Literal

import torch

from rookery.config import Config
from rookery.seeding import bulk_stream
from rookery.weights.merge.cross import Cross, Space, Takes, normalised, require_parents, shares

__all__ = [
    "ExtrapolateConfig",
    "Gram",
    "LayerwiseConfig",
    "LinearConfig",
    "SlerpConfig",
    "block_of",
    "extrapolate",
    "layerwise",
    "linear",
    "slerp",
]

# What a weighing operator may know of the parents at one place: its layer and their products.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gram:
    """`products()` [n, n] are inner products of the n parents there, computed when asked for."""

    layer: str
    products: Callable[[], torch.Tensor]


class LinearConfig(Config):
    takes: ClassVar[Takes] = Takes()
    type: Literal["linear"] = "linear"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart."""
    normalise: bool = True
    """Divide the weights by their sum; false takes them as they are."""


def linear(method: LinearConfig, *, cross: Cross, gram: Gram) -> tuple[float, ...]:  # noqa: ARG001
    return normalised(cross) if method.normalise else cross.weights


# Layer-wise: every block of the model takes one parent, or its own mixture of them.


_BLOCK = re.compile(r"^.*?\.\d+(?=\.)")


def block_of(layer: str) -> str:
    """The transformer block of a layer, "model.layers.3"; the layer itself if it is in none."""
    block = _BLOCK.match(layer)
    return block[0] if block else layer


class LayerwiseConfig(Config):
    takes: ClassVar[Takes] = Takes(is_convex=True)
    type: Literal["layerwise"] = "layerwise"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart; the same thing when `mode` is pick."""
    mode: Literal["pick", "mix"] = "pick"
    """pick: one parent, with probability its weight. mix: random coefficients of that mean."""
    unit: Literal["block", "layer"] = "block"
    """What draws together: a transformer block ("model.layers.3"), or each linear layer alone."""


def layerwise(method: LayerwiseConfig, *, cross: Cross, gram: Gram) -> tuple[float, ...]:
    """Coefficients of sum 1, the same for a and b and for every layer of one unit."""
    parts = shares(cross)
    unit = block_of(gram.layer) if method.unit == "block" else gram.layer
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


# SLERP: from one parent to the other along the arc between them, layer by layer.
#
# The straight line between two unrelated parents passes closer to zero than either; the arc keeps
# the size of the update. In delta space the angle is between the two delta W.


_LEAST_SINE = 1e-4
"""Below this sine the parents point the same (or the opposite) way: the arc is the line to seven
digits, or undefined, and the formula divides by almost nothing."""


class SlerpConfig(Config):
    takes: ClassVar[Takes] = Takes(least=2, most=2, is_convex=True)
    type: Literal["slerp"] = "slerp"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart."""


def slerp(method: SlerpConfig, *, cross: Cross, gram: Gram) -> tuple[float, ...]:
    """Two parents; the second weight's share is how far along the arc the child lies.

    The arc is taken between the directions, its length between the lengths: with lengths 1 and 3
    and shares (0.5, 0.5) the child has length 2.
    """
    require_parents(cross, takes=method.takes, method=method.type)
    first, second = shares(cross)
    products = gram.products()
    length_1, length_2 = float(products[0, 0]) ** 0.5, float(products[1, 1]) ** 0.5
    if length_1 == 0 or length_2 == 0:
        return first, second
    cosine = float(products[0, 1]) / (length_1 * length_2)
    angle = acos(max(-1.0, min(1.0, cosine)))
    if sin(angle) < _LEAST_SINE:
        return first, second
    length = first * length_1 + second * length_2
    return (
        sin(first * angle) / sin(angle) * length / length_1,
        sin(second * angle) / sin(angle) * length / length_2,
    )


# Extrapolation: past the first parent, away from the others: best + step * (best - other).
#
# Convex combinations never leave the hull of the founders; this does.


class ExtrapolateConfig(Config):
    takes: ClassVar[Takes] = Takes(least=2, is_convex=True)
    type: Literal["extrapolate"] = "extrapolate"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart."""
    step: float = 0.5
    """How far past the first parent, in units of the distance to the average of the others."""


def extrapolate(method: ExtrapolateConfig, *, cross: Cross, gram: Gram) -> tuple[float, ...]:  # noqa: ARG001
    """The first parent is the one to go past; the weights of the others average them."""
    require_parents(cross, takes=method.takes, method=method.type)
    others = Cross(parents=cross.parents[1:], weights=cross.weights[1:])
    return (1 + method.step, *(-method.step * share for share in shares(others)))
