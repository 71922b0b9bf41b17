"""Which slot each packed row uses, laid out so that the adapters of a batch are a few matmuls.

One `SlotRows` belongs to one pass, and so do the factors it may bring: passes in several threads
over one model do not see each other.

Rows of one slot are cut into blocks of a fixed number of rows, short blocks padded, and all
blocks go through one batched product. The block size belongs to the kind of row (a prompt row or
a decoded one), never to the batch: the same row gives the same bits in any batch.

    segments: rows 0-2 in slot 2, row 3 in none, rows 4-8 in slot 0; blocks of 4
    blocks:   [0 1 2 -] slot 2   [4 5 6 7] slot 0   [8 - - -] slot 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Segment", "SlotFactors", "SlotRows"]

SlotFactors = tuple[torch.Tensor, torch.Tensor]
"""A [S, rank, in] and scale * B [S, out, rank] of S slots of one linear layer."""


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
    slots: torch.Tensor | slice
    """[blocks] the slot of each block; a slice where they follow one another"""
    gather: torch.Tensor | None
    """[blocks * size] the packed row at each place, padding repeats a row; None: as they are"""
    scatter: torch.Tensor | None
    """[rows] the place of each packed row, rows of no block one past the last; None: as they are"""
    covers_all: bool
    """Every packed row is in some block."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [blocks, size, in]"""
        taken = x if self.gather is None else x.index_select(0, self.gather)
        return taken.view(-1, self.size, x.shape[-1])

    def pick(self, factors: torch.Tensor) -> torch.Tensor:
        """[S, m, n] -> [blocks, n, m]"""
        turned = factors.transpose(1, 2)
        if isinstance(self.slots, slice):
            return turned[self.slots]
        return turned.index_select(0, self.slots)

    def give(self, delta: torch.Tensor) -> torch.Tensor:
        """[blocks, size, out] -> [rows, out]"""
        flat = delta.view(-1, delta.shape[-1])
        if self.scatter is None:
            return flat
        if not self.covers_all:
            flat = torch.cat((flat, flat.new_zeros(1, flat.shape[-1])))
        return flat.index_select(0, self.scatter)


class SlotRows:
    """The plan of one packed batch; `take` and `add` apply it to linear layers.

    With `factors`, by name of the linear layer, the slots are those and not the model's own.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        num_rows: int,
        device: torch.device,
        factors: Mapping[str, SlotFactors] | None = None,
    ) -> None:
        self.factors = factors
        ordered = sorted(segments, key=lambda segment: segment.slot)
        sizes = sorted({segment.block for segment in segments})
        self._blocks = [
            _layout([s for s in ordered if s.block == size], size, num_rows, device)
            for size in sizes
        ]

    def take(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of x [rows, in] in their blocks, for any number of layers that read x."""
        return [blocks.take(x) for blocks in self._blocks]

    def add(
        self, out: torch.Tensor, taken: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """Add the adapters' part to out [rows, out] in place; a [S, r, in], b [S, out, r]."""
        for blocks, x in zip(self._blocks, taken, strict=True):
            out.add_(blocks.give(torch.bmm(torch.bmm(x, blocks.pick(a)), blocks.pick(b))))


def _layout(segments: Sequence[Segment], size: int, num_rows: int, device: torch.device) -> _Blocks:
    slots: list[int] = []
    gather: list[int] = []
    places: dict[int, int] = {}
    for segment in segments:
        for first in range(0, len(segment.rows), size):
            taken = segment.rows[first : first + size]
            places.update(zip(taken, range(len(gather), len(gather) + len(taken)), strict=True))
            gather.extend([*taken, *[taken[0]] * (size - len(taken))])
            slots.append(segment.slot)
    is_whole = gather == list(range(num_rows))
    scatter = [places.get(row, len(gather)) for row in range(num_rows)]
    follow = slots == list(range(slots[0], slots[0] + len(slots)))
    return _Blocks(
        size=size,
        slots=slice(slots[0], slots[-1] + 1) if follow else torch.tensor(slots, device=device),
        gather=None if is_whole else torch.tensor(gather, device=device),
        scatter=None if is_whole else torch.tensor(scatter, device=device),
        covers_all=len(places) == num_rows,
    )
