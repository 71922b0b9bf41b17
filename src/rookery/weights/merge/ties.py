"""TIES: trim each parent to its largest entries, elect a sign for each entry, average those of it.

    merged = sum of w_i * t_i over the parents that have the elected sign
             / sum of w_i over the same parents

where t_i is the trimmed parent and the elected sign is that of sum w_i * t_i. The weights are
divided once, over the parents that take part: equal parents give the parent.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.seeding import Key, bulk_stream
from rookery.weights.merge.compiled import Blend, Drop, Floats, Integers, Trim, open_rows
from rookery.weights.merge.cross import (
    BLOCK,
    Cross,
    Rows,
    Space,
    blocks,
    each,
    normalised,
    shares,
)

__all__ = [
    "DareConfig",
    "DareTiesConfig",
    "TiesConfig",
    "dare",
    "dare_ties",
    "drop_rows",
    "ties",
]

# DARE: drop random entries of each parent, scale up what is left, add.
#
# With density p an entry is kept with probability p and multiplied by 1 / p, so that on average
# nothing changes: the mean over keys is the linear combination.


_NUM_DECISIONS = 1 << 16
"""Independent decisions drawn per parent and child. A longer row is covered by blocks that start at
random places of them: within a block all decisions are independent, and two entries of different
blocks share one with probability 3e-5. They stay in the cache, and drawing them is 5 % of merging
rows of 3 million numbers; drawing one for each number would triple the cost."""
_STEPS = 1 << 16
"""The probability is rounded to a 65536th, and the factor is the reciprocal of the rounded one."""


class DareConfig(Config):
    type: Literal["dare"] = "dare"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, ge=1e-4, le=1)
    """The probability that an entry is kept."""
    normalise: bool = True
    """Divide the weights by their sum; false takes them as they are."""


def dare(method: DareConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Children of the rows [P, M] into `out` [C, M]."""
    drop_rows(
        rows,
        crosses=crosses,
        density=method.density,
        gains=lambda cross: normalised(cross) if method.normalise else cross.weights,
        elect_by=lambda cross: None,  # noqa: ARG005
        out=out,
    )


def drop_rows(
    rows: Rows,
    *,
    crosses: Sequence[Cross],
    density: float,
    gains: Callable[[Cross], Sequence[float]],
    elect_by: Callable[[Cross], Sequence[float] | None],
    out: torch.Tensor,
) -> None:
    """Drop, multiply each parent by its gain, then add or, with weights to elect by, elect."""
    engine, values, children = open_rows(rows, out)
    bounds = np.array(list(blocks(0, values.shape[1])), np.int64).reshape(-1, 2)

    def make(child: int) -> None:
        cross = crosses[child]
        weights = elect_by(cross)
        drawn = [
            _draw(bounds, density=density, gain=gain, key=(rows.name, i, *cross.key))
            for i, gain in enumerate(gains(cross))
        ]
        engine.blend(
            Blend(
                rows=[values[parent] for parent in cross.parents],
                bounds=bounds,
                entries=Drop([table for table, _ in drawn], np.stack([at for _, at in drawn])),
                weights=None if weights is None else np.array(weights, np.float32),
                out=children[child],
            )
        )

    each(make, range(len(crosses)))


def _draw(bounds: Integers, *, density: float, gain: float, key: Key) -> tuple[Floats, Integers]:
    """Factors of one parent, `gain` / p with probability p, else 0; and where each block starts."""
    rng = bulk_stream("dare", *key)
    length = int(bounds[-1, 1]) if len(bounds) else 0
    size = min(length, _NUM_DECISIONS)
    num_kept = round(density * _STEPS)
    words = rng.bit_generator.random_raw(-(-size // 4))
    is_kept = np.asarray(words, np.uint64).view(np.uint16)[:size] < num_kept
    factors: Floats = is_kept.astype(np.float32)
    factors *= np.float32(gain * _STEPS / num_kept)
    if size == length:
        return factors, bounds[:, 0]
    return factors, rng.integers(0, size - BLOCK, size=len(bounds), endpoint=True)


class TiesConfig(Config):
    type: Literal["ties"] = "ties"
    space: Space = "delta"
    """Combine delta W (dense, then the best low-rank approximation) or the two factors apart."""
    density: float = Field(default=0.7, gt=0, le=1)
    """The part of each tensor that is kept, largest magnitudes first."""


def ties(method: TiesConfig, *, rows: Rows, crosses: Sequence[Cross], out: torch.Tensor) -> None:
    """Children of the rows [P, M] into `out` [C, M]. Each parent's limits are found once."""
    engine, values, children = open_rows(rows, out)
    bounds = np.array([(piece.start, piece.stop) for piece in rows.pieces], np.int64)
    bounds = bounds.reshape(-1, 2)
    sizes = np.array([piece.sizes for piece in rows.pieces]).reshape(-1, len(values))
    counts = np.ascontiguousarray((method.density * sizes.T).astype(np.int64))
    used = sorted({parent for cross in crosses for parent in cross.parents})

    def find(row: int) -> Any:
        return engine.limits(values[row], bounds=bounds, counts=counts[row])

    limits = dict(zip(used, each(find, used), strict=True))

    def make(child: int) -> None:
        cross = crosses[child]
        engine.blend(
            Blend(
                rows=[values[parent] for parent in cross.parents],
                bounds=bounds,
                entries=Trim([limits[parent] for parent in cross.parents]),
                weights=np.array(shares(cross), np.float32),
                out=children[child],
            )
        )

    each(make, range(len(crosses)))


# DARE-TIES: drop random entries of each parent as DARE does, then elect signs as TIES does.


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
    drop_rows(
        rows,
        crosses=crosses,
        density=method.density,
        gains=lambda cross: [1] * len(cross.parents),
        elect_by=shares,
        out=out,
    )
