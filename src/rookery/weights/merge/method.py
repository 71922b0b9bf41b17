"""The operators by name. A new one is a file with its config and function, and a line here."""

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from rookery.weights.merge.dare import DareConfig, dare
from rookery.weights.merge.dare_ties import DareTiesConfig, dare_ties
from rookery.weights.merge.extrapolate import ExtrapolateConfig, extrapolate
from rookery.weights.merge.layerwise import LayerwiseConfig, layerwise
from rookery.weights.merge.linear import LinearConfig, linear
from rookery.weights.merge.slerp import SlerpConfig, slerp
from rookery.weights.merge.ties import TiesConfig, ties

__all__ = ["BLENDS", "UNIFORM", "WEIGHINGS", "MergeConfig", "is_dense"]

MergeConfig = Annotated[
    LinearConfig
    | TiesConfig
    | DareConfig
    | DareTiesConfig
    | SlerpConfig
    | LayerwiseConfig
    | ExtrapolateConfig,
    Field(discriminator="type"),
]

WEIGHINGS: Mapping[str, Callable[..., tuple[float, ...]]] = {
    "linear": linear,
    "slerp": slerp,
    "layerwise": layerwise,
    "extrapolate": extrapolate,
}
"""Operators that give each parent one coefficient per layer: exact at low rank."""

UNIFORM = frozenset({"linear", "extrapolate"})
"""Weighings that give every layer the same coefficients: a row is combined in one pass."""

BLENDS: Mapping[str, Callable[..., None]] = {"ties": ties, "dare": dare, "dare_ties": dare_ties}
"""Operators that treat every entry by itself: what they make of delta W has no low rank."""


def is_dense(method: MergeConfig) -> bool:
    """Whether it builds the dense delta W of every layer."""
    return method.space == "delta" and method.type in BLENDS
