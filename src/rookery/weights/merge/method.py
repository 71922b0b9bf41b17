"""The operators by name. A new one is a file with its config and function, and a line here."""

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from rookery.weights.merge.linear import (
    ExtrapolateConfig,
    LayerwiseConfig,
    LinearConfig,
    SlerpConfig,
    extrapolate,
    layerwise,
    linear,
    slerp,
)
from rookery.weights.merge.ties import DareConfig, DareTiesConfig, TiesConfig, dare, dare_ties, ties

__all__ = ["BLENDS", "UNIFORM", "WEIGHINGS", "MergeConfig", "check_operator", "is_dense"]

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


def check_operator(
    method: MergeConfig, *, name: str, num_parents: int, has_negative_weights: bool
) -> None:
    """ValueError with a sentence unless every child of so many parents, with such weights, can be
    made: for the check of a config, before anything runs. `name` is the operator's in the config.
    """
    takes = method.takes
    if num_parents < takes.least or (takes.most is not None and num_parents > takes.most):
        raise ValueError(
            f"the crossover {name!r} ({method.type}) has num_parents: {num_parents}, and takes "
            f"{takes.parents}: write another number, or another crossover such as linear"
        )
    if takes.is_convex and has_negative_weights:
        raise ValueError(
            f"the crossover {name!r} ({method.type}) is given weights that can be negative, and "
            "takes parts of a whole: write weights: fitness, uniform or random, or use linear to "
            "go beyond the parents"
        )
