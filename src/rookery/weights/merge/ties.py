"""TIES: trim each parent to its largest entries, elect a sign for each entry, average those of it.

    merged = sum of w_i * t_i over the parents that have the elected sign
             / sum of w_i over the same parents

where t_i is the trimmed parent and the elected sign is that of sum w_i * t_i. The weights are
divided once, over the parents that take part: equal parents give the parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.merge.blocks import BLOCK, blocks, each
from rookery.weights.merge.cross import Cross, Space, shares
from rookery.weights.merge.magnitude import kth_magnitude
from rookery.weights.merge.rows import Rows

__all__ = ["Ballot", "TiesConfig", "elect", "ties"]


class TiesConfig(Config):
    type: Literal["ties"] = "ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, gt=0, le=1)
    """The part of each tensor that is kept, largest magnitudes first."""


def ties(
    method: TiesConfig,
    rows: Rows,
    *,
    crosses: Sequence[Cross],
    out: torch.Tensor,
) -> None:
    """Children of the rows [P, M] into `out` [C, M]. Each parent is trimmed once per call."""
    used = sorted({parent for cross in crosses for parent in cross.parents})
    limits = dict(zip(used, each(lambda row: _limits(method, rows, row), used), strict=True))

    def make(child: int) -> None:
        cross, ballot = crosses[child], Ballot(len(crosses[child].parents))
        weights = shares(cross)
        for index, piece in enumerate(rows.pieces):
            for begin, end in blocks(piece.start, piece.stop):
                kept = ballot.votes(end - begin)
                for vote, parent in zip(kept, cross.parents, strict=True):
                    source = rows.data[parent, begin:end]
                    torch.ops.aten.hardshrink.out(source, limits[parent][index], out=vote)
                elect(ballot, kept, weights, out=out[child, begin:end])

    each(make, range(len(crosses)))


def _limits(method: TiesConfig, rows: Rows, row: int) -> list[float]:
    """Per piece the magnitude that an entry must exceed to be kept."""
    found = []
    for piece in rows.pieces:
        num_kept = int(method.density * piece.sizes[row])
        least = kth_magnitude(rows.data[row, piece.start : piece.stop], k=num_kept)
        found.append(float(np.nextafter(np.float32(least), np.float32(0))))
    return found


@dataclass(slots=True)
class Ballot:
    """The working memory of one election: a block for each vote and four for the count."""

    num_votes: int
    memory: torch.Tensor

    def __init__(self, num_votes: int) -> None:
        self.num_votes = num_votes
        self.memory = torch.empty(num_votes + 4, BLOCK)

    def votes(self, length: int) -> list[torch.Tensor]:
        return [self.memory[4 + vote, :length] for vote in range(self.num_votes)]


def elect(
    ballot: Ballot,
    votes: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    out: torch.Tensor,
) -> None:
    """The weighted mean of those votes that have the sign of the weighted sum of all.

    Where the sum is zero no sign is elected and the result is zero. `votes` are overwritten.
    """
    sign, for_it, share, part = (ballot.memory[slot, : len(out)] for slot in range(4))
    torch.mul(votes[0], weights[0], out=sign)
    for vote, weight in zip(votes[1:], weights[1:], strict=True):
        sign.add_(vote, alpha=weight)
    sign.sign_()
    for_it.zero_()
    share.fill_(torch.finfo(torch.float32).tiny)
    for vote, weight in zip(votes, weights, strict=True):
        torch.mul(vote, sign, out=part).clamp_(min=0)
        for_it.add_(part, alpha=weight)
        share.add_(part.gt_(0), alpha=weight)
    torch.div(for_it, share, out=out).mul_(sign)
