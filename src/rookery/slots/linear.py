"""A linear layer that holds adapter slots, and packs its base weights for the CPU.

On the CPU oneDNN's packed product is up to twice as fast at the few rows of a decoding step, and
each row's bits do not depend on how many rows are computed with it. For a row alone it takes twice
the time of the plain product, whose bits differ, and is used all the same. The plain product of MKL
has that property in its strict mode, which it reads when it is first called.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from rookery.slots.rows import SlotFactors, SlotRows
from rookery.types import LoraFactors

__all__ = [
    "ActiveRows",
    "EvenActivation",
    "LinearGroup",
    "MakeProduct",
    "PackedProduct",
    "SlottedLinear",
    "can_pack",
    "drop_pages",
]

Product = Callable[[torch.Tensor], torch.Tensor]
"""With weights in a layout of its own: [rows, in] -> [rows, out]."""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""Of plain weights [out, in] and a bias."""

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

_PACK_ROWS = 32
"""The number of rows oneDNN is told to expect; measured: the hint changes nothing."""


_LEAST_ROWS = 16
"""Of a plain product on the CPU: up to eight go through other kernels, with other bits."""

_LEAST_RANK = 4
"""Of slots: products of a few hundred numbers go through another kernel, with other bits, and the
rank that is reserved depends on what was loaded before."""


_VECTOR = 64
"""A multiple of the numbers that any CPU computes together."""

_THREAD_NUMBERS = 2**14
"""Torch shares out more among threads, wherever the cuts fall."""


class ActiveRows(threading.local):
    """The rows of this thread's forward pass, for every slotted layer of one model.

    The layers are transformers' own and pass no argument on to their linear layers.
    """

    rows: Sequence[SlotRows] = ()


def can_pack(*, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch build has the packed product for such weights."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and device.type == "cpu" and dtype == torch.float32


def drop_pages(weights: Iterable[torch.Tensor]) -> None:
    """Take weights that lie in a mapped file, unchanged, out of this process's memory. Who reads
    them again gets them from the file. Others stay as they are."""
    if not (maps := Path("/proc/self/maps")).exists():
        return
    places = [line.split() for line in maps.read_text().splitlines()]
    mapped = [tuple(int(x, 16) for x in place[0].split("-")) for place in places if place[4] != "0"]
    page = mmap.PAGESIZE
    for weight in weights:
        start = -(-weight.data_ptr() // page) * page
        stop = (weight.data_ptr() + weight.nbytes) // page * page
        if start < stop and any(first <= start and stop <= last for first, last in mapped):
            memory = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
            ctypes.CDLL(None).madvise(*memory, mmap.MADV_DONTNEED)


class PackedProduct:
    """A product with weights in oneDNN's layout: [rows, in] -> [rows, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return self(torch.cat((x, x)))[:1]  # alone it gets other bits on some CPUs
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


class SlottedLinear(nn.Module):
    """y = W x + bias + scale * B[slot] A[slot] x, the slot chosen per packed row."""

    def __init__(self, linear: nn.Linear, *, name: str, active: ActiveRows) -> None:
        super().__init__()
        self.name = name
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight: torch.Tensor | None = linear.weight
        self.bias = linear.bias
        self.a: nn.Parameter | None = None
        self.b: nn.Parameter | None = None
        self.num_changes = 0
        """How often the slots were written."""
        self._active = active
        self._packed: Product | None = None

    def pack(self, *, keep_weight: bool, product: MakeProduct = PackedProduct) -> None:
        """Trade the plain weights for another layout: inference only, no gradients after."""
        assert self.weight is not None
        self._packed = product(self.weight, self.bias)
        if not keep_weight:
            self.weight = None

    def unpack(self, weight: nn.Parameter) -> None:
        """Plain weights again, such as new ones."""
        self._packed = None
        self.weight = weight

    def reserve(self, *, num_slots: int, rank: int) -> None:
        """Make room for `num_slots` slots of `rank`; what is loaded stays where it is."""
        rank = max(rank, _LEAST_RANK)
        have_slots, have_rank = (0, 0) if self.a is None else tuple(self.a.shape[:2])
        if num_slots <= have_slots and rank <= have_rank:
            return
        num_slots, rank = max(num_slots, have_slots), max(rank, have_rank)
        like = self.bias if self.weight is None else self.weight
        dtype, device = (
            (torch.float32, torch.device("cpu"))
            if like is None
            else (
                like.dtype,
                like.device,
            )
        )
        # Stored transposed: batched products read them several times faster that way.
        a = torch.zeros(num_slots, self.in_features, rank, dtype=dtype, device=device)
        b = torch.zeros(num_slots, rank, self.out_features, dtype=dtype, device=device)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        if self.a is not None and self.b is not None:
            a[:have_slots, :have_rank] = self.a.detach()
            b[:have_slots, :, :have_rank] = self.b.detach()
        self.a = nn.Parameter(a, requires_grad=False)
        self.b = nn.Parameter(b, requires_grad=False)
        self.num_changes += 1

    @torch.no_grad()
    def put(self, slot: int, factors: LoraFactors) -> None:
        """Write into a cleared slot that is reserved. The scale is folded into B."""
        assert self.a is not None and self.b is not None
        rank = factors.a.shape[0]
        self.a[slot, :rank] = factors.a.to(self.a)
        self.b[slot, :, :rank] = factors.b.to(self.b) * factors.scale
        self.num_changes += 1

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Zero a slot, if there is such a slot."""
        if self.a is not None and self.b is not None and slot < len(self.a):
            self.a[slot] = 0
            self.b[slot] = 0
            self.num_changes += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        out = self.base(flat)
        for rows in self._active.rows:
            if (banks := self.banks(rows)) is not None:
                rows.add(out, rows.take(flat), banks)
        return out.view(*x.shape[:-1], self.out_features)

    def banks(self, rows: SlotRows) -> Sequence[SlotFactors] | None:
        """What the rows multiply by: factors of their pass, or else the slots loaded here."""
        if rows.factors is not None:
            return rows.factors.get(self.name)
        return None if self.a is None or self.b is None else [(self.a, self.b)]

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """The product without adapters: [rows, in] -> [rows, out]."""
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        if len(x) < _LEAST_ROWS and x.device.type == "cpu":
            among = nn.functional.pad(x, (0, 0, 0, _LEAST_ROWS - len(x)))
            return nn.functional.linear(among, self.weight, self.bias)[: len(x)]
        return nn.functional.linear(x, self.weight, self.bias)


class EvenActivation(nn.Module):
    """An activation that gives a number the same bits wherever it lies among others.

    Torch computes the last numbers of a tensor, and of each thread's part of it, one by one, with
    other bits than in vectors.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        whole = nn.functional.pad(flat, (0, -len(flat) % _VECTOR))
        parts = [self.plain(part) for part in torch.split(whole, _THREAD_NUMBERS)]
        even = parts[0] if len(parts) == 1 else torch.cat(parts)
        return even[: len(flat)].view(x.shape)


class LinearGroup:
    """Linear layers that read the same input, as one product; their outputs lie side by side."""

    def __init__(self, members: Sequence[SlottedLinear], *, active: ActiveRows) -> None:
        self._members = members
        ends = list(accumulate(member.out_features for member in members))
        self._columns = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
        self._active = active
        self._packed: Product | None = None
        self._stack: _Stack | None = None
        self._stacked_changes: list[int] = []

    def pack(self, product: MakeProduct) -> None:
        """Trade the members' plain weights for one in another layout: inference only."""
        weights = [member.weight for member in self._members if member.weight is not None]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = product(weight, self._joined_bias())
        for member in self._members:
            member.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, the members' outputs]"""
        if self._packed is None:
            out = torch.cat([member.base(x) for member in self._members], dim=-1)
        else:
            out = self._packed(x)
        for rows in self._active.rows:
            if (stack := self._stack_for(rows)) is not None:
                rows.add(out[:, stack.columns], rows.take(x), stack.banks)
        return out

    def _stack_for(self, rows: SlotRows) -> "_Stack | None":
        """The members' factors of this pass; those of the loaded slots are kept stacked."""
        if rows.factors is not None:
            return self._stacked(rows)
        changes = [member.num_changes for member in self._members]
        if changes != self._stacked_changes:
            self._stack = self._stacked(rows)
            self._stacked_changes = changes
        return self._stack

    def _stacked(self, rows: SlotRows) -> "_Stack | None":
        return _stack_slots([member.banks(rows) for member in self._members], self._columns)

    def _joined_bias(self) -> torch.Tensor | None:
        if all(member.bias is None for member in self._members):
            return None
        parts = [
            torch.zeros(member.out_features) if member.bias is None else member.bias.detach()
            for member in self._members
        ]
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The slots of a group's members as those of one layer: A's stacked, B's in blocks."""

    banks: Sequence[SlotFactors]
    columns: slice


def _stack_slots(
    members: Sequence[Sequence[SlotFactors] | None], columns: Sequence[slice]
) -> _Stack | None:
    adapted = [
        (banks, place) for banks, place in zip(members, columns, strict=True) if banks is not None
    ]
    if not adapted:
        return None
    whole = slice(adapted[0][1].start, adapted[-1][1].stop)
    if len(adapted) == 1:
        return _Stack(adapted[0][0], whole)
    places = [place for _, place in adapted]
    alike = zip(*(banks for banks, _ in adapted), strict=True)
    return _Stack([_stack_bank(bank, places, whole) for bank in alike], whole)


def _stack_bank(
    factors: Sequence[SlotFactors], places: Sequence[slice], whole: slice
) -> SlotFactors:
    a = torch.cat([a.transpose(1, 2) for a, _ in factors], dim=2)
    b = a.new_zeros(len(a), a.shape[2], whole.stop - whole.start)
    rank = 0
    for (_, part), place in zip(factors, places, strict=True):
        ranks = slice(rank, rank + part.shape[2])
        b[:, ranks, place.start - whole.start : place.stop - whole.start] = part.transpose(1, 2)
        rank = ranks.stop
    return a.transpose(1, 2), b.transpose(1, 2)
