"""TIES: trim each parent to its largest entries, elect a sign for each entry, average those of it.

    merged = sum of w_i * t_i over the parents that have the elected sign
             / sum of w_i over the same parents

where t_i is the trimmed parent and the elected sign is that of sum w_i * t_i. The weights are
divided once, over the parents that take part: equal parents give the parent.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.merge.blocks import BLOCK, Floats, blocks, each
from rookery.weights.merge.cross import Cross, Space, shares
from rookery.weights.merge.magnitude import kth_magnitude
from rookery.weights.merge.rows import Rows

__all__ = ["Ballot", "TiesConfig", "limits", "ties"]


_NEXT_TO_NOTHING = np.float32(1e-30)
"""Added to the weights of the elected so that none elected gives 0 / 1e-30 = 0. It changes no
weight above 1e-22."""


class TiesConfig(Config):
    type: Literal["ties"] = "ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, gt=0, le=1)
    """The part of each tensor that is kept, largest magnitudes first."""


def ties(method: TiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Children of the rows [P, M] into `out` [C, M]. Each parent's limits are found once."""
    values, children = rows.data.numpy(), out.numpy()
    used = sorted({parent for cross in crosses for parent in cross.parents})
    found = each(lambda row: limits(method, rows=rows, row=row), used)
    least = dict(zip(used, found, strict=True))

    def make(child: int) -> None:
        cross, ballot = crosses[child], Ballot(shares(crosses[child]))
        for index, piece in enumerate(rows.pieces):
            for begin, end in blocks(piece.start, piece.stop):
                for vote, parent in enumerate(cross.parents):
                    ballot.trim(vote, values[parent, begin:end], least[parent][index])
                ballot.elect(children[child, begin:end])

    each(make, range(len(crosses)))


def limits(method: TiesConfig, *, rows: Rows, row: int) -> list[np.float32]:
    """Per piece the least magnitude that is kept."""
    values = rows.data[row].numpy()
    return [
        kth_magnitude(values[piece.start : piece.stop], k=int(method.density * piece.sizes[row]))
        for piece in rows.pieces
    ]


class Ballot:
    """The election of one child, block by block: set the votes, then count them into the result."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = [np.float32(weight) for weight in weights]
        self._votes = np.empty((len(weights), BLOCK), np.float32)
        self._work = np.empty((3, BLOCK), np.float32)
        self._flags = np.empty(BLOCK, np.bool_)

    def trim(self, vote: int, source: Floats, limit: np.float32) -> None:
        """The vote is the source where its magnitude reaches the limit, else zero."""
        size = source.size
        kept, flags = self._work[0, :size], self._flags[:size]
        np.abs(source, out=kept)
        np.greater_equal(kept, limit, out=flags)
        np.copyto(kept, flags)
        np.multiply(source, kept, out=self._votes[vote, :size])

    def scale(self, vote: int, source: Floats, factors: Floats) -> None:
        """The vote is the source times the factors."""
        np.multiply(source, factors, out=self._votes[vote, : source.size])

    def elect(self, out: Floats) -> None:
        """The weighted mean of the votes that have the sign of the weighted sum of all.

        Where the sum is zero no sign is elected and the result is zero.
        """
        size = out.size
        total, part, weight_of = (work[:size] for work in self._work)
        (first, lead), *others = zip(self._votes[:, :size], self._weights, strict=True)
        np.multiply(first, lead, out=total)
        for vote, weight in others:
            np.multiply(vote, weight, out=part)
            np.add(total, part, out=total)
        self._weigh(first, lead, total, out=weight_of)
        np.multiply(first, weight_of, out=out)
        for vote, weight in others:
            self._weigh(vote, weight, total, out=part)
            np.add(weight_of, part, out=weight_of)
            np.multiply(vote, part, out=part)
            np.add(out, part, out=out)
        np.add(weight_of, _NEXT_TO_NOTHING, out=weight_of)
        np.divide(out, weight_of, out=out)

    def _weigh(self, vote: Floats, weight: np.float32, total: Floats, *, out: Floats) -> None:
        """The weight where the vote has the sign of the total, else zero."""
        np.multiply(vote, total, out=out)
        np.greater(out, 0, out=self._flags[: out.size])
        np.copyto(out, self._flags[: out.size])
        np.multiply(out, weight, out=out)
