"""DARE-TIES: drop random entries of each parent as DARE does, then elect signs as TIES does."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.merge.cross import Cross, Space, Takes, shares
from rookery.weights.merge.dare import drop_rows
from rookery.weights.merge.rows import Rows

__all__ = ["DareTiesConfig", "dare_ties"]


class DareTiesConfig(Config):
    takes: ClassVar[Takes] = Takes(is_convex=True)
    type: Literal["dare_ties"] = "dare_ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """The probability that an entry is kept."""


def dare_ties(
    method: DareTiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor
) -> None:
    """Children of the rows [P, M] into `out` [C, M]."""
    drop_rows(
        rows,
        crosses=crosses,
        density=method.density,
        gains=lambda cross: [1] * len(cross.parents),
        elect_by=shares,
        out=out,
    )
