"""The operators by name. A new one is a file with its config and function, and a line here."""

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from rookery.weights.merge.linear import LayerwiseConfig, LinearConfig, layerwise, linear
from rookery.weights.merge.ties import DareConfig, DareTiesConfig, TiesConfig, dare, dare_ties, ties

__all__ = ["BLENDS", "WEIGHINGS", "MergeConfig", "is_dense"]

MergeConfig = Annotated[
    LinearConfig | TiesConfig | DareConfig | DareTiesConfig | LayerwiseConfig,
    Field(discriminator="type"),
]

WEIGHINGS: Mapping[str, Callable[..., tuple[float, ...]]] = {
    "linear": linear,
    "layerwise": layerwise,
}
"""Operators that give each parent one coefficient per layer: exact at low rank."""

BLENDS: Mapping[str, Callable[..., None]] = {"ties": ties, "dare": dare, "dare_ties": dare_ties}
"""Operators that treat every entry by itself: what they make of delta W has no low rank."""


def is_dense(method: MergeConfig) -> bool:
    """Whether it builds the dense delta W of every layer."""
    return method.space == "delta" and method.type in BLENDS
