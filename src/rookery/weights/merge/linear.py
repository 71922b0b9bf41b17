"""Linear: the weighted sum of the parents. With equal weights the uniform average.

LinearConfig()                    # weights are divided by their sum: an average
LinearConfig(normalise=False)     # weights as they are: weights (1, 1) are the plain sum
"""

import re
from typing import Literal

from rookery.config import Config
from rookery.seeding import bulk_stream
from rookery.weights.merge.cross import Cross, Space, normalised, shares

__all__ = ["LayerwiseConfig", "LinearConfig", "block_of", "layerwise", "linear"]


class LinearConfig(Config):
    type: Literal["linear"] = "linear"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart."""
    normalise: bool = True
    """Divide the weights by their sum; false takes them as they are."""


def linear(method: LinearConfig, *, cross: Cross, layer: str) -> tuple[float, ...]:  # noqa: ARG001
    return normalised(cross) if method.normalise else cross.weights


# Layer-wise: every block of the model takes one parent, or its own mixture of them.


_BLOCK = re.compile(r"^.*?\.\d+(?=\.)")


def block_of(layer: str) -> str:
    """The transformer block of a layer, "model.layers.3"; the layer itself if it is in none."""
    block = _BLOCK.match(layer)
    return block[0] if block else layer


class LayerwiseConfig(Config):
    type: Literal["layerwise"] = "layerwise"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart; the same thing when `mode` is pick."""
    mode: Literal["pick", "mix"] = "pick"
    """pick: one parent, with probability its weight. mix: random coefficients of that mean."""
    unit: Literal["block", "layer"] = "block"
    """What draws together: a transformer block ("model.layers.3"), or each linear layer alone."""


def layerwise(method: LayerwiseConfig, *, cross: Cross, layer: str) -> tuple[float, ...]:
    """Coefficients of sum 1, the same for a and b and for every layer of one unit."""
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
