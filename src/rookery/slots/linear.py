"""A linear layer with adapter slots, and packed base weights for the CPU.

On the CPU, oneDNN's packed product is up to twice as fast for the few rows of a decoding step, and
a row's bits do not depend on the number of rows. A single row takes twice the time of the plain
product, but the plain product's bits differ, so it is not used. MKL's plain product has this
property in strict mode, which MKL reads from the environment at its first call.
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
"""Product with packed weights: [rows, in] -> [rows, out]."""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""(plain weights [out, in], bias) -> product with these weights packed."""


class Packing(NamedTuple):
    """Packed products for a model's layers and its head."""

    layers: MakeProduct
    head: MakeProduct


os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

_PACK_ROWS = 32
"""Row count passed to oneDNN as a hint; by measurement it has no effect."""


_MIN_ROWS = 16
"""Fewest rows of a plain product on the CPU: up to 8 rows use other kernels, with other bits."""

_MIN_RANK = 4
"""Smallest rank reserved per slot. Products of a few hundred numbers use another kernel, with other
bits, and the reserved rank depends on earlier adapters."""


_VECTOR = 64
"""A multiple of every CPU's vector width, in numbers."""

_THREAD_NUMBERS = 2**14
"""Most numbers that torch computes in one thread; it splits larger tensors at any place."""


class ActiveRows(threading.local):
    """The slot plans of this thread's forward pass, shared by all slotted layers of a model.

    transformers' layers cannot pass extra arguments to their linear layers.
    """

    rows: Sequence[SlotRows] = ()


def can_pack(*, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch build has the packed product for this device and dtype."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and device.type == "cpu" and dtype == torch.float32


def drop_pages(weights: Iterable[torch.Tensor]) -> None:
    """Release the memory of unchanged weights in a mapped file; the next read loads them from the
    file again. Other weights are unaffected."""
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
            return self(torch.cat((x, x)))[:1]  # on some CPUs a single row gets other bits
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


FLOAT32 = Packing(PackedProduct, PackedProduct)


class SlottedLinear(nn.Module):
    """y = W x + bias + scale * B[slot] A[slot] x, with the slot chosen per packed row."""

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
        """Number of writes to the slots, to detect changes."""
        self._active = active
        self._packed: Product | None = None

    def pack(self, *, keep_weight: bool, product: MakeProduct = PackedProduct) -> None:
        """Replace the plain weights by a packed product, which has no gradients."""
        assert self.weight is not None
        self._packed = product(self.weight, self.bias)
        if not keep_weight:
            self.weight = None

    def unpack(self, weight: nn.Parameter) -> None:
        """Replace the packed product by plain weights."""
        self._packed = None
        self.weight = weight

    def reserve(self, *, num_slots: int, rank: int) -> None:
        """Make room for `num_slots` slots of `rank`; loaded adapters keep their slots."""
        rank = max(rank, _MIN_RANK)
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
        # Stored transposed, which batched products read several times faster.
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
        """Write factors into a reserved, cleared slot. The scale is folded into B."""
        assert self.a is not None and self.b is not None
        rank = factors.a.shape[0]
        self.a[slot, :rank] = factors.a.to(self.a)
        self.b[slot, :, :rank] = factors.b.to(self.b) * factors.scale
        self.num_changes += 1

    @torch.no_grad()
    def clear(self, slot: int) -> None:
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
        """Return the factors if all rows use one slot of plain, frozen weights; else None."""
        if len(self._active.rows) != 1 or self._packed is not None or self.weight is None:
            return None
        [rows] = self._active.rows
        banks = self.banks(rows)
        return None if banks is None or self.weight.requires_grad else rows.only_pair(banks)

    def banks(self, rows: SlotRows) -> Sequence[SlotFactors] | None:
        """Return the factors for `rows`: those of their pass, or else the loaded slots."""
        if rows.factors is not None:
            return rows.factors.get(self.name)
        return None if self.a is None or self.b is None else [(self.a, self.b)]

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product without adapters: [rows, in] -> [rows, out]."""
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        if len(x) < _MIN_ROWS and x.device.type == "cpu":
            padded = nn.functional.pad(x, (0, 0, 0, _MIN_ROWS - len(x)))
            return nn.functional.linear(padded, self.weight, self.bias)[: len(x)]
        return nn.functional.linear(x, self.weight, self.bias)


class _OnePair(torch.autograd.Function):
    """x W + bias + x A B for one adapter. The small product adds to the output of the large one,
    so a GPU passes over the rows half as often as with a separate sum."""

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
    """An activation whose bits do not depend on a number's position in the tensor.

    torch computes the tail of a tensor, and of each thread's part, in scalars, with other bits.
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
    """Linear layers with the same input as one product; their outputs are side by side."""

    def __init__(self, members: Sequence[SlottedLinear], *, active: ActiveRows) -> None:
        self._members = members
        ends = list(accumulate(member.out_features for member in members))
        self._columns = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
        self._active = active
        self._packed: Product | None = None
        self._stack: _Stack | None = None
        self._stacked_changes: list[int] = []

    def pack(self, product: MakeProduct) -> None:
        """Replace the members' plain weights by one packed product, which has no gradients."""
        weights = [member.weight for member in self._members if member.weight is not None]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = product(weight, self._joined_bias())
        for member in self._members:
            member.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, outputs of all members]"""
        if self._packed is None:
            out = torch.cat([member.base(x) for member in self._members], dim=-1)
        else:
            out = self._packed(x)
        for rows in self._active.rows:
            if (stack := self._stack_for(rows)) is not None:
                rows.add(out[:, stack.columns], rows.take(x), stack.banks)
        return out

    def _stack_for(self, rows: SlotRows) -> "_Stack | None":
        """Return the members' stacked factors for a pass; the loaded slots' stack is cached."""
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
    """The slots of a group's members as slots of one layer: stacked A, block-diagonal B."""

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


# 4-bit weights on the CPU: a linear product that reads a seventh of the memory.
#
# A weight is d q + m with q from 0 to 15; each group of 32 along a row of weights has its own d and
# m. Symmetric groups need no m, but give SmolLM2 18 times the KL divergence. Weights that already
# lie on such a grid, such as those of a Q4_1 file, are represented exactly.
#
#     weights    0.3  0.5  0.2 ... 1.7       d = 0.1, m = 0.2
#     q            1    3    0 ...  15       the kernel gets d (q - 8) and m + 8 d = 1.0
#
# KleidiAI's kernel, which torch has on Arm, rounds d to bfloat16 and each input row to 8 bits. It
# computes only d (q - 8). The rest, m + 8 d times the sum of the group's inputs, is a separate
# float32 product of a 32nd of the size.
#
# The kernel for AVX2 and AVX512 rounds d, m + 8 d, inputs and outputs to bfloat16. That is too
# coarse for logits, so the head uses float16 weights there. From about 20 rows on it is slower than
# float32.


_GROUP = 32
_CHUNK_ROWS = 4096
"""Weight rows quantised at a time: a head is 30 times the size of a layer."""

_pack_arm = torch.ops.aten._dyn_quant_pack_4bit_weight
_multiply_arm = torch.ops.aten._dyn_quant_matmul_4bit
_pack_x86 = torch.ops.aten._convert_weight_to_int4pack_for_cpu
_multiply_x86 = torch.ops.aten._weight_int4pack_mm_for_cpu
_OUT_MULTIPLE_X86 = 16
"""The x86 kernel needs a multiple of this number of weight rows."""


def int4_packing() -> Packing:
    """Return this machine's 4-bit packing; ModelError if none exists or its bits vary by batch."""
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
    """Make a 4-bit product; a float32 product if the inputs are not whole groups."""
    is_whole = weight.shape[1] % _GROUP == 0
    return ArmInt4Product(weight, bias) if is_whole else PackedProduct(weight, bias)


def _x86_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    is_whole = weight.shape[1] % _GROUP == 0 and weight.shape[0] % _OUT_MULTIPLE_X86 == 0
    return X86Int4Product(weight, bias) if is_whole else PackedProduct(weight, bias)


class ArmInt4Product:
    """Product with 4-bit weights in KleidiAI's kernel: [rows, in] -> [rows, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._sizes = (weight.shape[1], weight.shape[0])
        numbers, scales, rests = _quantise(weight.detach())
        # If a group is a whole row, another kernel applies, with float32 scales.
        kind = torch.float32 if weight.shape[1] == _GROUP else torch.bfloat16
        self._packed = _pack_arm(numbers, scales.to(kind), bias, _GROUP, *self._sizes)
        self._rests = rests.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        product: torch.Tensor = _multiply_arm(x, self._packed, _GROUP, *self._sizes)
        sums = x.view(len(x), -1, _GROUP).sum(dim=2)
        if len(x) > 1:
            return product.addmm_(sums, self._rests)
        # A single row would use another kernel, with other bits.
        return torch.addmm(product.expand(2, -1), sums.expand(2, -1), self._rests)[:1]


class X86Int4Product:
    """Product with 4-bit weights in the kernel for AVX2 and AVX512: [rows, in] -> [rows, out]."""

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
    """Product with float16 weights on x86, computed in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, two per byte [out, in / 2], and d and m + 8 d [out, groups]."""
    parts = [_quantise_rows(rows) for rows in torch.split(weight, _CHUNK_ROWS)]
    numbers, scales, rests = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers, scales, rests


def _quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = (high - low) / 15
    whole = torch.where(scale > 0, scale, 1.0)  # in a group of equal numbers only m matters
    numbers = ((groups - low) / whole).round_().to(torch.uint8).view(len(weight), -1)
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    return pairs, scale[..., 0], (low + 8 * scale)[..., 0]
