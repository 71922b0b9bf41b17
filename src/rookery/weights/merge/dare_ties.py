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
from rookery.weights.merge.ties import Ballot, elect

__all__ = ["DareTiesConfig", "dare_ties"]


class DareTiesConfig(Config):
    type: Literal["dare_ties"] = "dare_ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """The probability that an entry is kept."""


def dare_ties(
    method: DareTiesConfig,
    rows: Rows,
    *,
    crosses: Sequence[Cross],
    out: torch.Tensor,
) -> None:
    """Children of the rows [P, M] into `out` [C, M]."""
    length = rows.data.shape[1]

    def make(child: int) -> None:
        cross, ballot = crosses[child], Ballot(len(crosses[child].parents))
        weights = shares(cross)
        masks = [
            Mask(length=length, density=method.density, gain=1, key=(rows.name, index, *cross.key))
            for index in range(len(weights))
        ]
        for begin, end in blocks(0, length):
            votes = ballot.votes(end - begin)
            for vote, parent, mask in zip(votes, cross.parents, masks, strict=True):
                torch.mul(rows.data[parent, begin:end], mask.factors(begin, end), out=vote)
            elect(ballot, votes, weights, out=out[child, begin:end])

    each(make, range(len(crosses)))
