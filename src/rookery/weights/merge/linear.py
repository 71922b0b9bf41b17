"""Linear: the weighted sum of the parents. With equal weights the uniform average.

LinearConfig()                    # weights are divided by their sum: an average
LinearConfig(normalise=False)     # weights as they are: weights (1, 1) are the plain sum
"""

from typing import ClassVar, Literal

from rookery.config import Config
from rookery.weights.merge.cross import Cross, Space, Takes, normalised
from rookery.weights.merge.gram import Gram

__all__ = ["LinearConfig", "linear"]


class LinearConfig(Config):
    takes: ClassVar[Takes] = Takes()
    type: Literal["linear"] = "linear"
    space: Space = "delta"
    """Combine delta W (exact) or the two factors apart."""
    normalise: bool = True
    """Divide the weights by their sum; false takes them as they are."""


def linear(method: LinearConfig, *, cross: Cross, gram: Gram) -> tuple[float, ...]:  # noqa: ARG001
    return normalised(cross) if method.normalise else cross.weights
