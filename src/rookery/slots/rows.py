"""Plans which slot each packed row uses, so that a batch's adapters take only a few matmuls.

A `SlotRows` and its factors belong to one pass: passes of several threads are independent.

The rows of a slot are cut into blocks of a fixed size, with padding, and all blocks go through one
batched product. The block size depends on the kind of row (prompt or decoded) and never on the
batch, so that a row has the same bits in any batch.

    segments: rows 0-2 in slot 2, row 3 in none, rows 4-8 in slot 0; blocks of 4
    blocks:   [0 1 2 -] slot 2   [4 5 6 7] slot 0   [8 - - -] slot 0
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

__all__ = ["PositionEncoding", "Segment", "SlotFactors", "SlotRows"]


class PositionEncoding:
    """Rotary encoding of packed positions, once per kind of layer with its own encoding.

    Some encodings (longrope, dynamic) depend on the whole pass: if one position exceeds a limit,
    all positions are encoded differently. But a pass packs sequences of different lengths, and
    cached tokens were encoded for an earlier length. So such models' context ends at that limit.
    """

    def __init__(self, decoder: Any) -> None:
        self._rotary = decoder.rotary_emb
        self._device = decoder.embed_tokens.weight.device
        takes_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds: list[str] | None = decoder.config.layer_types if takes_kind else None

    def __call__(self, states: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """Return the encoding per kind of layer, with the dtype and device of `states`."""
        if self._kinds is None:
            return {"": self._rotary(states, positions)}
        return {kind: self._rotary(states, positions, kind) for kind in set(self._kinds)}

    def kind(self, layer: int) -> str:
        return self._kinds[layer] if self._kinds else ""

    def fixed_tokens(self, declared: int) -> int:
        """Return the sequence length up to which encodings depend only on the position: `declared`,
        or less if the encoding changes earlier, found by bisection."""
        alone = self._first_in(2)
        fixed, changed = 2, declared + 1
        if self._is_same(alone, self._first_in(declared)):
            return declared
        while changed - fixed > 1:
            middle = (fixed + changed) // 2
            if self._is_same(alone, self._first_in(middle)):
                fixed = middle
            else:
                changed = middle
        self._first_in(2)  # some encodings remember the longest sequence; reset them
        return fixed

    def _first_in(self, length: int) -> list[torch.Tensor]:
        """Return the encoding of position 1 in a sequence of this length."""
        positions = torch.tensor([[1, length - 1]], device=self._device)
        encoded = self(torch.empty(1, 2, 1, device=self._device), positions).values()
        parts = [x if isinstance(x, tuple) else (x,) for x in encoded]
        return [part[:, :1].clone() for kind in parts for part in kind]

    @staticmethod
    def _is_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


SlotFactors = tuple[torch.Tensor, torch.Tensor]
"""A [S, rank, in] and scale * B [S, out, rank] of S slots of one linear layer: a bank."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed rows that use one slot. Rows of the base model are in no segment."""

    slot: int
    rows: Sequence[int]
    block: int
    bank: int = 0
    """Index of the layer's bank that holds the slot; all slots of a bank have the same rank."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All blocks of one size and bank."""

    bank: int
    size: int
    num_blocks: int
    slots: torch.Tensor | slice
    """[blocks] slot of each block; a slice if they are consecutive."""

    @property
    def num_places(self) -> int:
        return self.size * self.num_blocks

    def pick(self, factors: torch.Tensor) -> torch.Tensor:
        """[S, m, n] -> [blocks, n, m]"""
        turned = factors.transpose(1, 2)
        if isinstance(self.slots, slice):
            # Avoid a slice of everything, which costs operations in the backward pass.
            return turned if self.num_blocks == len(turned) else turned[self.slots]
        return turned.index_select(0, self.slots)


class SlotRows:
    """Slot plan of one packed batch; `take` and `add` apply it to linear layers.

    `factors`, banks by name of the linear layer, replace the model's own slots.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        num_rows: int,
        device: torch.device,
        factors: Mapping[str, Sequence[SlotFactors]] | None = None,
    ) -> None:
        self.factors = factors
        ordered = sorted(segments, key=lambda one: (one.bank, one.block, one.slot))
        gather: list[int] = []
        places: dict[int, int] = {}
        self._blocks: list[_Blocks] = []
        for (bank, size), same in groupby(ordered, key=lambda one: (one.bank, one.block)):
            slots = [slot for segment in same for slot in _lay(segment, gather, places)]
            self._blocks.append(_Blocks(bank, size, len(slots), _picker(slots, device)))
        is_whole = gather == list(range(num_rows))
        self._layout = None if is_whole else _Layout.of(gather, places, num_rows, device)
        """None if the rows are already in block order."""
        self._last: tuple[torch.Tensor, int, list[torch.Tensor]] | None = None

    def take(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of x [rows, in] in blocks; layers with the same x share the result."""
        if self.factors is None:
            return self._take(x)
        # Queries, keys and values read the same x; in training they also share its gradient.
        if self._last is not None:
            seen, version, taken = self._last
            if _is_same(seen, x) and version == x._version:
                return taken
        taken = self._take(x)
        # Keep x alive, so that no other tensor can reuse its memory.
        self._last = (x, x._version, taken)
        return taken

    def _take(self, x: torch.Tensor) -> list[torch.Tensor]:
        if not self._blocks:
            return []
        flat = x if self._layout is None else self._layout.take(x)
        parts = torch.split(flat, [blocks.num_places for blocks in self._blocks])
        return [
            part.view(-1, blocks.size, x.shape[-1])
            for part, blocks in zip(parts, self._blocks, strict=True)
        ]

    def only_pair(self, banks: Sequence[SlotFactors]) -> SlotFactors | None:
        """Return A [rank, in] and B [out, rank] if all rows are one block of a one-slot bank."""
        if self._layout is not None or len(self._blocks) != 1 or self._blocks[0].num_blocks != 1:
            return None
        a, b = banks[self._blocks[0].bank]
        return (a.squeeze(0), b.squeeze(0)) if len(a) == 1 else None

    def add(
        self, out: torch.Tensor, taken: list[torch.Tensor], banks: Sequence[SlotFactors]
    ) -> None:
        """Add the adapters' outputs to out [rows, out] in place."""
        if not self._blocks:
            return
        parts = []
        for blocks, x in zip(self._blocks, taken, strict=True):
            a, b = (blocks.pick(factor) for factor in banks[blocks.bank])
            parts.append(torch.bmm(torch.bmm(x, a), b).view(-1, out.shape[-1]))
        places = parts[0] if len(parts) == 1 else torch.cat(parts)
        out.add_(places if self._layout is None else self._layout.put(places))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Mapping between packed rows and places in blocks."""

    gather: torch.Tensor
    """[places] packed row at each place; padding repeats a row."""
    scatter: torch.Tensor
    """[rows] place of each packed row; one past the last place for rows in no block."""
    padding: torch.Tensor
    """Places that are padding."""
    covers_all: bool
    """Whether every packed row is in a block."""

    @classmethod
    def of(
        cls, gather: list[int], places: dict[int, int], num_rows: int, device: torch.device
    ) -> "_Layout":
        padding = sorted(set(range(len(gather))) - set(places.values()))
        return cls(
            gather=torch.tensor(gather, device=device),
            scatter=torch.tensor(
                [places.get(row, len(gather)) for row in range(num_rows)], device=device
            ),
            padding=torch.tensor(padding, dtype=torch.long, device=device),
            covers_all=len(places) == num_rows,
        )

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """`to_places` with gradients."""
        taken: torch.Tensor = _Take.apply(rows, self)  # type: ignore[no-untyped-call]
        return taken

    def put(self, places: torch.Tensor) -> torch.Tensor:
        """`to_rows` with gradients."""
        put: torch.Tensor = _Put.apply(places, self)  # type: ignore[no-untyped-call]
        return put

    def to_places(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.gather)

    def to_rows(self, places: torch.Tensor) -> torch.Tensor:
        """Rows of no block are 0."""
        if not self.covers_all:
            places = torch.cat((places, places.new_zeros(1, places.shape[-1])))
        return places.index_select(0, self.scatter)


class _Take(torch.autograd.Function):
    """Rows -> places. Since padding has no gradient, the backward pass is a selection too.
    index_select's own gradient adds rows one by one: a quarter of a pass with several trainees."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layout: _Layout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_places(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layout.to_rows(gradient), None


class _Put(torch.autograd.Function):
    """Places -> rows."""

    @staticmethod
    def forward(ctx: Any, places: torch.Tensor, layout: _Layout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_rows(places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        return layout.to_places(gradient).index_fill_(0, layout.padding, 0), None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are the same view of the same memory; works for fake tensors too."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.shape == other.shape and one.storage_offset() == other.storage_offset()


def _lay(segment: Segment, gather: list[int], places: dict[int, int]) -> list[int]:
    """Append a segment's blocks to `gather` and `places`; return the slot of each block."""
    size, slots = segment.block, []
    for first in range(0, len(segment.rows), size):
        taken = segment.rows[first : first + size]
        places.update(zip(taken, range(len(gather), len(gather) + len(taken)), strict=True))
        gather.extend([*taken, *[taken[0]] * (size - len(taken))])
        slots.append(segment.slot)
    return slots


def _picker(slots: list[int], device: torch.device) -> torch.Tensor | slice:
    follow = slots == list(range(slots[0], slots[0] + len(slots)))
    return slice(slots[0], slots[-1] + 1) if follow else torch.tensor(slots, device=device)
