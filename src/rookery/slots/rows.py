"""Which slot each packed row uses, laid out so that the adapters of a batch are a few matmuls.

One `SlotRows` belongs to one pass, and so do the factors it may bring: passes in several threads
over one model do not see each other.

Rows of one slot are cut into blocks of a fixed number of rows, short blocks padded, and all
blocks go through one batched product. The block size belongs to the kind of row (a prompt row or
a decoded one), never to the batch: the same row gives the same bits in any batch.

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

# The rotary position encoding of a model, and how far it is a function of the position alone.
#
# Some encodings (longrope, dynamic) look at the whole pass: with one position beyond a limit, all
# positions of the pass are encoded in another way. Packed sequences, prefixes computed in parts and
# rows decoded together have different lengths in one pass, and a token kept in a cache was encoded
# for the length its sequence had then. So such models are read up to that limit only.


class PositionEncoding:
    """Encodes packed positions, once for each kind of layer that has an encoding of its own."""

    def __init__(self, decoder: Any) -> None:
        self._rotary = decoder.rotary_emb
        self._device = decoder.embed_tokens.weight.device
        takes_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds: list[str] | None = decoder.config.layer_types if takes_kind else None

    def __call__(self, states: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """By kind of layer: what its attention takes; type and device are those of `states`."""
        if self._kinds is None:
            return {"": self._rotary(states, positions)}
        return {kind: self._rotary(states, positions, kind) for kind in set(self._kinds)}

    def kind(self, layer: int) -> str:
        return self._kinds[layer] if self._kinds else ""

    def fixed_tokens(self, declared: int) -> int:
        """The length up to which a position is encoded alike in every sequence.

        That is the `declared` length, unless the encoding changes before: then it is searched for.
        """
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
        self._first_in(2)  # some encodings remember the longest they have seen
        return fixed

    def _first_in(self, length: int) -> list[torch.Tensor]:
        """How position 1 is encoded in a sequence of this length."""
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
    """Which of the layer's banks has the slot; slots of one bank have one rank."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All blocks of one size and bank."""

    bank: int
    size: int
    num_blocks: int
    slots: torch.Tensor | slice
    """[blocks] the slot of each block; a slice where they follow one another"""

    @property
    def num_places(self) -> int:
        return self.size * self.num_blocks

    def pick(self, factors: torch.Tensor) -> torch.Tensor:
        """[S, m, n] -> [blocks, n, m]"""
        turned = factors.transpose(1, 2)
        if isinstance(self.slots, slice):
            # Even a slice of all costs operations in the backward pass.
            return turned if self.num_blocks == len(turned) else turned[self.slots]
        return turned.index_select(0, self.slots)


class SlotRows:
    """The plan of one packed batch; `take` and `add` apply it to linear layers.

    With `factors`, the banks of linear layers by name, the slots are those and not the model's own.
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
        """None: the rows lie in their places as they are."""
        self._last: tuple[torch.Tensor, int, list[torch.Tensor]] | None = None

    def take(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of x [rows, in] in their blocks, for any number of layers that read x."""
        if self.factors is None:
            return self._take(x)
        # Queries, keys and values read the same x: in training also their gradients are one.
        if self._last is not None:
            seen, version, taken = self._last
            if _is_same(seen, x) and version == x._version:
                return taken
        taken = self._take(x)
        # Held together with x, so that no other tensor gets its memory.
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
        """A [rank, in] and B [out, rank], if all rows lie in one block of a bank of one slot."""
        if self._layout is not None or len(self._blocks) != 1 or self._blocks[0].num_blocks != 1:
            return None
        a, b = banks[self._blocks[0].bank]
        return (a.squeeze(0), b.squeeze(0)) if len(a) == 1 else None

    def add(
        self, out: torch.Tensor, taken: list[torch.Tensor], banks: Sequence[SlotFactors]
    ) -> None:
        """Add the adapters' part to out [rows, out] in place."""
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
    """Where packed rows lie in the blocks, and back."""

    gather: torch.Tensor
    """[places] the packed row at each place; padding repeats a row"""
    scatter: torch.Tensor
    """[rows] the place of each packed row, rows of no block one past the last"""
    padding: torch.Tensor
    """The places that are padding."""
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
    """Rows to their places. Padding has no gradient, so that its own is a selection too: that of
    index_select adds rows one by one, and was a quarter of a pass of several trainees."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layout: _Layout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_places(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layout.to_rows(gradient), None


class _Put(torch.autograd.Function):
    """Places to their rows."""

    @staticmethod
    def forward(ctx: Any, places: torch.Tensor, layout: _Layout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_rows(places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        return layout.to_places(gradient).index_fill_(0, layout.padding, 0), None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are views of the same memory; also of tensors that have shapes and no data."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.shape == other.shape and one.storage_offset() == other.storage_offset()


def _lay(segment: Segment, gather: list[int], places: dict[int, int]) -> list[int]:
    """Append the blocks of a segment; the slot of each."""
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
