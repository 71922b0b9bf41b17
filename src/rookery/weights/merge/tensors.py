"""The passes as torch calls: for rows on a GPU, and where there is no compiler.

They round as the compiled ones do. On a GPU a pass holds a few rows of temporary numbers, elsewhere
a few blocks of them.
"""

from collections.abc import Iterator

import numpy as np
import torch

from rookery.weights.merge.blend import NEXT_TO_NOTHING, Blend, Drop, Floats, Integers, Trim
from rookery.weights.merge.blocks import blocks

__all__ = ["Tensors", "as_tensors"]


class Tensors:
    """An Engine of tensors."""

    def limits(self, row: torch.Tensor, *, bounds: Integers, counts: Integers) -> torch.Tensor:
        found = row.new_full((len(bounds),), torch.inf)
        for i, ((begin, end), k) in enumerate(zip(bounds.tolist(), counts.tolist(), strict=True)):
            if k:
                found[i] = _kth_magnitude(row[begin:end], k)
        return found

    def blend(self, blend: Blend[torch.Tensor]) -> None:
        tables = _tables(blend)
        for stretch, (start, stop) in enumerate(blend.bounds.tolist()):
            for begin, end in _pieces(blend.out, start, stop):
                rows = [row[begin:end] for row in blend.rows]
                if isinstance(blend.entries, Trim):
                    votes = [
                        torch.where(row.abs() >= limits[stretch], row, 0.0)
                        for row, limits in zip(rows, blend.entries.limits, strict=True)
                    ]
                else:
                    starts = (blend.entries.starts[:, stretch] + (begin - start)).tolist()
                    votes = [
                        row * table[first : first + end - begin]
                        for row, table, first in zip(rows, tables, starts, strict=True)
                    ]
                blend.out[begin:end] = _count(votes, blend.weights)


def as_tensors(blend: Blend[Floats]) -> Blend[torch.Tensor]:
    """The same pass on the same memory."""
    entries = blend.entries
    return Blend(
        rows=[torch.from_numpy(row) for row in blend.rows],
        bounds=blend.bounds,
        entries=Trim([torch.from_numpy(own) for own in entries.limits])
        if isinstance(entries, Trim)
        else entries,
        weights=blend.weights,
        out=torch.from_numpy(blend.out),
    )


def _kth_magnitude(row: torch.Tensor, k: int) -> torch.Tensor:
    if row.device.type == "cpu":
        return row.abs().kthvalue(len(row) - k + 1).values
    # Sorting waits for nothing; what selects has to know how many are left.
    return row.abs().sort(descending=True).values[k - 1]


def _pieces(out: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What is computed at a time: blocks that stay in a core's cache, or all of it on a GPU."""
    return blocks(start, stop) if out.device.type == "cpu" else iter([(start, stop)])


def _tables(blend: Blend[torch.Tensor]) -> list[torch.Tensor]:
    if not isinstance(blend.entries, Drop):
        return []
    device = blend.out.device
    return [torch.from_numpy(np.float32(table)).to(device) for table in blend.entries.tables]


def _count(votes: list[torch.Tensor], weights: Floats | None) -> torch.Tensor:
    if weights is None:
        return _added(votes)
    shares = weights.tolist()
    total = _added([vote * share for vote, share in zip(votes, shares, strict=True)])
    if len(votes) == 2:
        return _elect_pair(votes[0], votes[1], total)
    heard = [
        torch.where(vote * total > 0, share, 0.0) for vote, share in zip(votes, shares, strict=True)
    ]
    products = [vote * share for vote, share in zip(votes, heard, strict=True)]
    agreed = _added(products) + 0.0  # -0 becomes 0
    return agreed / (_added(heard) + float(NEXT_TO_NOTHING))


def _elect_pair(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The weighted sum where both votes have its sign, else the one that has it, else 0."""
    has_first, has_second = first * total > 0, second * total > 0
    alone = torch.where(has_second, second, 0.0)
    return torch.where(has_first, torch.where(has_second, total, first), alone)


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    total, *others = parts
    for part in others:
        total = total + part
    return total
