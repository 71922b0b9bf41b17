"""A particle's step: to its own best, to the best of all, away from the worst, with inertia.

    v' = (i * v + c * (own_best - x) + s * (best - x) - r * (worst - x)) / (i + c + s + r)
    x' = x + step * v'

where i, c, s, r are the four strengths, each times its own uniform draw from the key.
"""

from dataclasses import dataclass

import torch
from pydantic import Field

from rookery.config import Config
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.merge import Cross, LinearConfig, Space, merge_stack
from rookery.weights.stack import stack, unstack
from rookery.weights.version import make_adapter

__all__ = ["Guides", "MoveConfig", "Moved", "move"]


class MoveConfig(Config):
    """The defaults are those of the published succession step."""

    space: Space = "delta"
    """Move delta W (exact, then cut to the rank) or the two factors apart."""
    step: float = Field(default=0.5, ge=0)
    """Length of the step; the caller shrinks it over the generations."""
    inertia: float = Field(default=0.2, ge=0)
    """Strength of the previous velocity."""
    cognitive: float = Field(default=0.2, ge=0)
    """Strength of the pull to the candidate's own best."""
    social: float = Field(default=0.2, ge=0)
    """Strength of the pull to the best of all."""
    repel: float = Field(default=0.1, ge=0)
    """Strength of the push away from the worst of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """What a candidate steers by. `velocity` is None before its first move."""

    own_best: Adapter
    best: Adapter
    worst: Adapter
    velocity: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The candidate after the step, which is a new one to evaluate, and its velocity.

    In delta space the velocity's delta W is the velocity. In factor space its a and b are the
    velocities of a and b, and its delta W means nothing.
    """

    adapter: Adapter
    velocity: Adapter


def move(
    adapter: Adapter, *, guides: Guides, method: MoveConfig, key: Key, rank: int | None = None
) -> Moved:
    """One step. In delta space the results have `rank`, by default the candidate's own."""
    strengths = (method.inertia, method.cognitive, method.social, method.repel)
    drawn = bulk_stream("move", *key).random(4)
    i, c, s, r = (float(x) * y for x, y in zip(drawn, strengths, strict=True))
    total = i + c + s + r or 1.0
    pulls = ((r - c - s) / total, i / total, c / total, s / total, -r / total)
    weights = [(1 + method.step * pulls[0], *(method.step * pull for pull in pulls[1:])), pulls]
    velocity = guides.velocity or _still(adapter)
    population = stack([adapter, velocity, guides.own_best, guides.best, guides.worst])
    moved = merge_stack(
        population,
        crosses=[Cross(parents=(0, 1, 2, 3, 4), weights=weight) for weight in weights],
        method=LinearConfig(space=method.space, normalise=False),
        rank=(rank or adapter.rank) if method.space == "delta" else None,
    )
    new, speed = unstack(moved, names=[adapter.name, f"{adapter.name}-velocity"])
    return Moved(adapter=new, velocity=speed)


def _still(adapter: Adapter) -> Adapter:
    factors = {
        layer: LoraFactors(a=torch.zeros_like(f.a), b=torch.zeros_like(f.b), scale=f.scale)
        for layer, f in adapter.factors.items()
    }
    return make_adapter(adapter.name, base=adapter.base, factors=factors)
