"""A linear layer that holds adapter slots, and packs its base weights for the CPU.

On the CPU oneDNN's packed product is up to twice as fast at the few rows of a decoding step, and
each row's bits do not depend on how many rows are computed with it. For a row alone it takes twice
the time of the plain product, whose bits differ, and is used all the same. The plain product of MKL
has that property in its strict mode, which it reads when it is first called.
"""

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rookery.errors import ModelError
from rookery.slots.rows import SlotFactors, SlotRows
from rookery.types import LoraFactors

__all__ = [
    "FLOAT32",
    "ActiveRows",
    "ArmInt4Product",
    "EvenActivation",
    "HalfProduct",
    "LinearGroup",
    "MakeProduct",
    "PackedProduct",
    "Packing",
    "SlottedLinear",
    "X86Int4Product",
    "can_pack",
    "drop_pages",
    "int4_packing",
]


Product = Callable[[torch.Tensor], torch.Tensor]
"""With weights in a layout of its own: [rows, in] -> [rows, out]."""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""Of plain weights [out, in] and a bias."""


class Packing(NamedTuple):
    """The products that a model's linear layers are packed for."""

    layers: MakeProduct
    head: MakeProduct


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


FLOAT32 = Packing(PackedProduct, PackedProduct)


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
        pair = self._only_pair() if x.is_cuda else None
        if pair is not None:
            out: torch.Tensor = _OnePair.apply(flat, self.weight, self.bias, *pair)  # type: ignore[no-untyped-call]
            return out.view(*x.shape[:-1], self.out_features)
        out = self.base(flat)
        for rows in self._active.rows:
            if (banks := self.banks(rows)) is not None:
                rows.add(out, rows.take(flat), banks)
        return out.view(*x.shape[:-1], self.out_features)

    def _only_pair(self) -> SlotFactors | None:
        """The factors, where one pass over all rows adds those of one slot to plain weights."""
        if len(self._active.rows) != 1 or self._packed is not None or self.weight is None:
            return None
        [rows] = self._active.rows
        banks = self.banks(rows)
        return None if banks is None or self.weight.requires_grad else rows.only_pair(banks)

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


class _OnePair(torch.autograd.Function):
    """x W + bias + x A B of one adapter. The small products add to what the large ones wrote, so
    that a GPU passes over the rows half as often as with a sum of both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        low = x @ a.t()
        ctx.save_for_backward(x, low, weight, a, b)
        return nn.functional.linear(x, weight, bias).addmm_(low, b.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        low_gradient = gradient @ b
        needs_x, _, _, needs_a, needs_b = ctx.needs_input_grad
        return (
            (gradient @ weight).addmm_(low_gradient, a) if needs_x else None,
            None,
            None,
            low_gradient.t() @ x if needs_a else None,
            gradient.t() @ low if needs_b else None,
        )


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


# Weights of four bits on the CPU: a linear product that reads a seventh of the memory.
#
# A weight is d q + m with q from 0 to 15; each group of 32 along a row of weights has its own d and
# m. Symmetric groups would need no m, and cost SmolLM2 18 times the KL divergence. Numbers that lie
# on such a grid, as those of a Q4_1 file do, are taken as they are.
#
#     weights    0.3  0.5  0.2 ... 1.7       d = 0.1, m = 0.2
#     q            1    3    0 ...  15       d (q - 8) and m + 8 d = 1.0 to the kernel
#
# KleidiAI's kernel, which torch has on Arm, rounds d to bfloat16 and each row of inputs to 8 bit.
# It knows d (q - 8) alone. The rest of a weight, m + 8 d, times the sum of the group's inputs is a
# product of a 32nd of the size, in float32.
#
# The kernel of AVX2 and AVX512 rounds d, m + 8 d, inputs and outputs to bfloat16: too coarse for
# logits, so the head has weights in float16 there. It is slower than float32 from about 20 rows on.


_GROUP = 32
_CHUNK_ROWS = 4096
"""Rows of weights that are quantised at a time: a head is 30 times the size of a layer."""

_pack_arm = torch.ops.aten._dyn_quant_pack_4bit_weight
_multiply_arm = torch.ops.aten._dyn_quant_matmul_4bit
_pack_x86 = torch.ops.aten._convert_weight_to_int4pack_for_cpu
_multiply_x86 = torch.ops.aten._weight_int4pack_mm_for_cpu
_LEAST_OUT_X86 = 16
"""That kernel takes multiples of these rows of weights."""


def int4_packing() -> Packing:
    """In four bits by this machine's kernel; ModelError unless there is one, and it gives a row the
    same bits among any number."""
    packing = _find_packing()
    if packing is None:
        raise ModelError(
            f"weights is int4, for which torch {torch.__version__} has a kernel on Linux for Arm "
            f"and for AVX2; here ({platform.machine()}) it would be slower than float32: leave "
            "weights out."
        )
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(37, 576, generator=random)
    for make in dict.fromkeys(packing):
        product = make(torch.randn(192, 576, generator=random), None)
        together = product(rows)
        if any(not torch.equal(product(rows[:n]), together[:n]) for n in (1, 2, 3, 4, 8, 16, 36)):
            raise ModelError(
                "weights is int4, and on this CPU the bits of its products depend on the number of "
                "rows, so that results would depend on the batch: leave weights out."
            )
    return packing


def _find_packing() -> Packing | None:
    has_arm: bool = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    if has_arm:
        return Packing(_arm_product, _arm_product)
    has_half = "fbgemm" in torch.backends.quantized.supported_engines
    if has_half and torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return Packing(_x86_product, HalfProduct)
    return None


def _arm_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """In float32 where rows are not whole groups."""
    is_whole = weight.shape[1] % _GROUP == 0
    return ArmInt4Product(weight, bias) if is_whole else PackedProduct(weight, bias)


def _x86_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    is_whole = weight.shape[1] % _GROUP == 0 and weight.shape[0] % _LEAST_OUT_X86 == 0
    return X86Int4Product(weight, bias) if is_whole else PackedProduct(weight, bias)


class ArmInt4Product:
    """A product with weights of four bits: [rows, in] -> [rows, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._sizes = (weight.shape[1], weight.shape[0])
        numbers, scales, rests = _quantise(weight.detach())
        # A group that is a whole row goes through a kernel with float32 scales.
        kind = torch.float32 if weight.shape[1] == _GROUP else torch.bfloat16
        self._packed = _pack_arm(numbers, scales.to(kind), bias, _GROUP, *self._sizes)
        self._rests = rests.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        product: torch.Tensor = _multiply_arm(x, self._packed, _GROUP, *self._sizes)
        sums = x.view(len(x), -1, _GROUP).sum(dim=2)
        if len(x) > 1:
            return product.addmm_(sums, self._rests)
        # Alone it goes through another kernel, with other bits.
        return torch.addmm(product.expand(2, -1), sums.expand(2, -1), self._rests)[:1]


class X86Int4Product:
    """The same with the kernel of AVX2 and AVX512."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        numbers, scales, rests = _quantise(weight.detach())
        each = torch.stack((numbers & 15, numbers >> 4), dim=2).view(weight.shape)
        self._packed = _pack_x86(each.int(), 1)
        self._grids = torch.stack((scales, rests), dim=2).transpose(0, 1).contiguous().bfloat16()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().contiguous()
        product: torch.Tensor = _multiply_x86(x, self._packed, _GROUP, self._grids)
        return product.float() if self._bias is None else product + self._bias


class HalfProduct:
    """A product with weights in float16 on x86, computed in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two q in each byte [out, in / 2], d and m + 8 d [out, groups]."""
    parts = [_quantise_rows(rows) for rows in torch.split(weight, _CHUNK_ROWS)]
    numbers, scales, rests = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers, scales, rests


def _quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = (high - low) / 15
    whole = torch.where(scale > 0, scale, 1.0)  # a group of equal numbers is m alone
    numbers = ((groups - low) / whole).round_().to(torch.uint8).view(len(weight), -1)
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    return pairs, scale[..., 0], (low + 8 * scale)[..., 0]
