"""The passes as torch calls: for rows on a GPU, where numpy and C do not reach.

A pass holds a few rows of temporary numbers. It rounds as the other engines do.
"""

import numpy as np
import torch

from rookery.weights.merge.blend import NEXT_TO_NOTHING, Blend, Drop, Floats, Integers, Trim

__all__ = ["Tensors"]


class Tensors:
    """An Engine of tensors."""

    def limits(self, row: torch.Tensor, *, bounds: Integers, counts: Integers) -> torch.Tensor:
        """By sorting, which waits for nothing; what selects has to know how many are left."""
        found = row.new_full((len(bounds),), torch.inf)
        for i, ((begin, end), k) in enumerate(zip(bounds.tolist(), counts.tolist(), strict=True)):
            if k:
                found[i] = row[begin:end].abs().sort(descending=True).values[k - 1]
        return found

    def blend(self, blend: Blend[torch.Tensor]) -> None:
        tables = _tables(blend)
        for stretch, (begin, end) in enumerate(blend.bounds.tolist()):
            rows = [row[begin:end] for row in blend.rows]
            if isinstance(blend.entries, Trim):
                votes = [
                    torch.where(row.abs() >= limits[stretch], row, 0.0)
                    for row, limits in zip(rows, blend.entries.limits, strict=True)
                ]
            else:
                starts = blend.entries.starts[:, stretch].tolist()
                votes = [
                    row * table[start : start + end - begin]
                    for row, table, start in zip(rows, tables, starts, strict=True)
                ]
            blend.out[begin:end] = _count(votes, blend.weights)


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
