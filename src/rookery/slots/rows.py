"""Which slot each packed row uses, laid out so that the adapters of a batch are a few matmuls.

Rows of one slot are cut into blocks of a fixed number of rows, short blocks padded, and all
blocks go through one batched product. The block size belongs to the kind of row (a prompt row or
a decoded one), never to the batch: the same row gives the same bits in any company.

    segments: rows 0-2 in slot 2, row 3 in none, rows 4-8 in slot 0; blocks of 4
    blocks:   [0 1 2 -] slot 2   [4 5 6 7] slot 0   [8 - - -] slot 0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Segment", "SlotRows"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed rows that use one slot. Rows of the base model are in no segment."""

    slot: int
    rows: Sequence[int]
    block: int


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All blocks of one size."""

    size: int
    slots: torch.Tensor
    """[blocks] the slot of each block"""
    gather: torch.Tensor
    """[blocks * size] the packed row at each place; places of padding repeat a row"""
    places: torch.Tensor
    """[adapted rows] the place of each adapted row"""
    rows: torch.Tensor
    """[adapted rows] the packed row at each of `places`"""
    is_whole: bool
    """No padding, and every packed row is here in its order: gather and scatter are no-ops."""


class SlotRows:
    """The plan of one packed batch; `add` applies it to one linear layer."""

    def __init__(self, segments: Sequence[Segment], *, num_rows: int, device: torch.device) -> None:
        sizes = sorted({segment.block for segment in segments})
        self._groups = [
            _layout([s for s in segments if s.block == size], size, num_rows, device)
            for size in sizes
        ]

    def add(
        self, out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """out [rows, out] + the adapters' part of x [rows, in]; a [S, r, in], b [S, out, r]."""
        for blocks in self._groups:
            taken = x if blocks.is_whole else x.index_select(0, blocks.gather)
            taken = taken.view(-1, blocks.size, x.shape[-1])
            shrunk = torch.bmm(taken, a.index_select(0, blocks.slots).transpose(1, 2))
            delta = torch.bmm(shrunk, b.index_select(0, blocks.slots).transpose(1, 2))
            delta = delta.view(-1, out.shape[-1])
            if blocks.is_whole:
                out = out + delta
            else:
                out = out.index_add(0, blocks.rows, delta.index_select(0, blocks.places))
        return out


def _layout(segments: Sequence[Segment], size: int, num_rows: int, device: torch.device) -> _Blocks:
    slots: list[int] = []
    gather: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for segment in segments:
        for first in range(0, len(segment.rows), size):
            taken = segment.rows[first : first + size]
            places.extend(range(len(gather), len(gather) + len(taken)))
            rows.extend(taken)
            gather.extend([*taken, *[taken[0]] * (size - len(taken))])
            slots.append(segment.slot)
    return _Blocks(
        size=size,
        slots=torch.tensor(slots, device=device),
        gather=torch.tensor(gather, device=device),
        places=torch.tensor(places, device=device),
        rows=torch.tensor(rows, device=device),
        is_whole=gather == list(range(num_rows)),
    )
