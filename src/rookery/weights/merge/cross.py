"""One child to make: which rows of a stack, how much of each, and the key of its randomness."""

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Literal

from rookery.errors import AdapterError
from rookery.seeding import Key

__all__ = ["Cross", "Space", "Takes", "normalised", "require_parents", "shares"]

Space = Literal["delta", "factor"]
"""Where parents are combined: on delta W = b @ a itself, or on a and b apart.

Averaging a and b apart is not averaging delta W: for two unrelated parents it gives an update of
half the size. It is there to reproduce published results.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """`Cross(parents=(0, 3), weights=(0.4, 0.6), key=(seed, generation, child))`.

    A child depends on its own cross alone, never on the others made in the same call.
    """

    parents: tuple[int, ...]
    weights: tuple[float, ...]
    key: Key = ()

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.weights):
            raise AdapterError(
                f"Got {len(self.parents)} parents and {len(self.weights)} weights; "
                "give at least one parent and one weight for each."
            )
        if not all(isinstance(weight, Real) and isfinite(weight) for weight in self.weights):
            raise AdapterError(
                f"Got the weights {list(self.weights)}; give finite numbers, one for each parent."
            )
        # Numbers of numpy would make double tensors of what is multiplied by them.
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))


def normalised(cross: Cross) -> tuple[float, ...]:
    """Weights divided by their sum."""
    total = sum(cross.weights)
    if total == 0:
        raise AdapterError(
            f"The weights {list(cross.weights)} sum to 0 and cannot be normalised; "
            "give weights with another sum."
        )
    return tuple(weight / total for weight in cross.weights)


def shares(cross: Cross) -> tuple[float, ...]:
    """Weights as parts of a whole: none negative, sum 1."""
    if min(cross.weights) < 0:
        raise AdapterError(
            f"Got the weights {list(cross.weights)}; this operator needs weights of at least 0. "
            "Use `extrapolate` or `linear` to go beyond the parents."
        )
    return normalised(cross)


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What an operator is defined for; asked before a run, and again of each child."""

    least: int = 1
    """Parents."""
    most: int | None = None
    """None: any number."""
    is_convex: bool = False
    """Weights are parts of a whole: none may be negative."""

    @property
    def parents(self) -> str:
        """In words."""
        if self.most is None:
            return f"at least {self.least}"
        return f"{self.least}" if self.most == self.least else f"{self.least} to {self.most}"


def require_parents(cross: Cross, *, takes: Takes, method: str) -> None:
    """AdapterError unless the number of parents is one the operator is defined for."""
    num = len(cross.parents)
    if num < takes.least or (takes.most is not None and num > takes.most):
        raise AdapterError(f"`{method}` got {num} parents; it needs {takes.parents}.")
