"""TIES: trim each parent to its largest entries, elect a sign for each entry, average those of it.

    merged = sum of w_i * t_i over the parents that have the elected sign
             / sum of w_i over the same parents

where t_i is the trimmed parent and the elected sign is that of sum w_i * t_i. The weights are
divided once, over the parents that take part: equal parents give the parent.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from rookery.config import Config
from rookery.weights.merge.blend import Blend, Trim
from rookery.weights.merge.blocks import each
from rookery.weights.merge.cross import Cross, Space, Takes, shares
from rookery.weights.merge.engines import open_rows
from rookery.weights.merge.rows import Rows

__all__ = ["TiesConfig", "ties"]


class TiesConfig(Config):
    takes: ClassVar[Takes] = Takes(is_convex=True)
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
