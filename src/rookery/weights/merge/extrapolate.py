"""Extrapolation: past the first parent, away from the others: best + step * (best - other).

Convex combinations never leave the hull of the founders; this does.
"""

from typing import ClassVar, Literal

from rookery.config import Config
from rookery.weights.merge.cross import Cross, Space, Takes, require_parents, shares
from rookery.weights.merge.gram import Gram

__all__ = ["ExtrapolateConfig", "extrapolate"]


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
