"""SLERP: from one parent to the other along the arc between them, layer by layer.

The straight line between two unrelated parents passes closer to zero than either; the arc keeps
the size of the update. In delta space the angle is between the two delta W.
"""

from math import acos, sin
from typing import ClassVar, Literal

from rookery.config import Config
from rookery.weights.merge.cross import Cross, Space, Takes, require_parents, shares
from rookery.weights.merge.gram import Gram

__all__ = ["SlerpConfig", "slerp"]

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
