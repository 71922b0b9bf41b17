"""DARE-TIES: drop random entries of each parent as DARE does, then elect signs as TIES does."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.merge.blocks import blocks, each
from rookery.weights.merge.cross import Cross, Space, shares
from rookery.weights.merge.dare import Mask
from rookery.weights.merge.rows import Rows
from rookery.weights.merge.ties import Ballot

__all__ = ["DareTiesConfig", "dare_ties"]


class DareTiesConfig(Config):
    type: Literal["dare_ties"] = "dare_ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """The probability that an entry is kept."""


def dare_ties(
    method: DareTiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor
) -> None:
    """Children of the rows [P, M] into `out` [C, M]."""
    values, children = rows.data.numpy(), out.numpy()
    length = values.shape[1]

    def make(child: int) -> None:
        cross = crosses[child]
        weights = shares(cross)
        ballot = Ballot(weights)
        masks = [
            Mask(length=length, density=method.density, gain=1, key=(rows.name, i, *cross.key))
            for i in range(len(weights))
        ]
        for begin, end in blocks(0, length):
            for vote, (parent, mask) in enumerate(zip(cross.parents, masks, strict=True)):
                ballot.scale(vote, values[parent, begin:end], mask.factors(begin, end))
            ballot.elect(children[child, begin:end])

    each(make, range(len(crosses)))
