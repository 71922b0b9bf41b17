"""Adapters of many slots on a GPU: each token multiplies with the factors of its own slot.

vLLM's kernels sort tokens by slot and multiply block by block, for every existing slot. With 64
slots of a few tokens each, most of their blocks are empty, and finding that out takes longer than
computing. Here one program handles one token. It reads a slot's factors once per token, so it is
used only where that is cheap: see `is_for`.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from functools import cache
from typing import Any

import triton
import triton.language as tl

__all__ = ["agree", "expand", "install", "is_for", "shrink"]

logger = logging.getLogger(__name__)

_SMALL_RANK = 4
"""Up to this rank, reading the factors costs less than reading their inputs and outputs."""
_LARGEST_RANK = 16
"""Beyond this rank a program would need more registers than a GPU has."""
_TOKENS_PER_SLOT = 16
"""With more tokens per slot, at ranks in between, vLLM's kernels find their blocks full."""


def is_for(num_tokens: int, *, rank: int, num_slots: int) -> bool:
    """True if the kernels of this file take less time than vLLM's."""
    is_spread = rank <= _LARGEST_RANK and num_tokens <= _TOKENS_PER_SLOT * num_slots
    return rank <= _SMALL_RANK or is_spread


@triton.jit  # type: ignore[untyped-decorator]
def _num_mapped(starts, num_starts, STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of tokens with a slot; the entries behind them belong to an earlier batch."""
    places = tl.arange(0, STARTS)
    return tl.max(tl.load(starts + places, mask=places < num_starts, other=0))


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_kernel(  # type: ignore[no-untyped-def]
    inputs,
    factors,
    out,
    slots,
    starts,
    num_starts,
    num_slots,
    num_in,
    scaling,
    input_stride,
    slot_stride,
    out_part_stride,
    out_token_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STARTS: tl.constexpr,
):
    """out[part, token] = scaling * A[slot of the token] @ inputs[token]"""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots) | (token >= _num_mapped(starts, num_starts, STARTS)):
        return
    if PARTS > 1:
        factors = tl.load(factors + part).to(tl.pointer_type(inputs.dtype.element_ty))
    ranks, places = tl.arange(0, RANKS), tl.arange(0, BLOCK)
    rows = factors + slot * slot_stride + ranks[:, None] * num_in
    total = tl.zeros([RANKS, BLOCK], dtype=tl.float32)
    for begin in range(0, num_in, BLOCK):
        at = begin + places
        x = tl.load(inputs + token * input_stride + at, mask=at < num_in, other=0.0)
        is_in = (ranks[:, None] < RANK) & (at[None, :] < num_in)
        a = tl.load(rows + at[None, :], mask=is_in, other=0.0)
        total += a.to(tl.float32) * x.to(tl.float32)[None, :]
    to = out + part * out_part_stride + token * out_token_stride + ranks
    tl.store(to, tl.sum(total, axis=1) * scaling, mask=ranks < RANK)


@triton.jit  # type: ignore[untyped-decorator]
def _expand_kernel(  # type: ignore[no-untyped-def]
    inputs,
    factors,
    out,
    slots,
    starts,
    num_starts,
    begins,
    sizes,
    num_slots,
    input_part_stride,
    input_token_stride,
    out_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ARE_EQUAL: tl.constexpr,
    IS_ADDED: tl.constexpr,
    STARTS: tl.constexpr,
):
    """out[token, begin of the part:] (+)= B[slot of the token] @ inputs[part, token]"""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    num_out = sizes if ARE_EQUAL else tl.load(sizes + part)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64)
    is_out = (tl.program_id(1) * BLOCK >= num_out) | (slot < 0) | (slot >= num_slots)
    if is_out | (token >= _num_mapped(starts, num_starts, STARTS)):
        return
    begin = begins
    if PARTS > 1:
        begin = tl.load(begins + part).to(tl.int64)
        factors = tl.load(factors + part).to(tl.pointer_type(out.dtype.element_ty))
    ranks = tl.arange(0, RANKS)
    x = tl.load(
        inputs + part * input_part_stride + token * input_token_stride + ranks,
        mask=ranks < RANK,
        other=0.0,
    )
    is_in = (at[:, None] < num_out) & (ranks[None, :] < RANK)
    rows = factors + slot * num_out * RANK + at[:, None] * RANK
    b = tl.load(rows + ranks[None, :], mask=is_in, other=0.0)
    moved = tl.sum(b.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    to = out + token * out_stride + begin + at
    if IS_ADDED:  # rounded first, as vLLM's kernel does
        rounded = moved.to(out.dtype.element_ty).to(tl.float32)
        moved = rounded + tl.load(to, mask=at < num_out, other=0.0).to(tl.float32)
    tl.store(to, moved.to(out.dtype.element_ty), mask=at < num_out)


def shrink(
    inputs: Any, factors: Any, out: Any, slots: Any, starts: Any, *, parts: int, scaling: float
) -> None:
    """`factors`: A of all slots, [slots, rank, in]; for several parts the first A and a tensor of
    addresses. `starts`: where each slot's tokens begin in sorted order, and the end."""
    first, addresses = factors
    num_slots, rank, num_in = first.shape[0], first.shape[-2], first.shape[-1]
    ranks = triton.next_power_of_2(rank)
    _shrink_kernel[(inputs.shape[0], parts)](
        inputs,
        addresses,
        out,
        slots,
        starts,
        len(starts),
        num_slots,
        num_in,
        scaling,
        inputs.stride(0),
        rank * num_in,
        out.stride(0),
        out.stride(1),
        RANK=rank,
        RANKS=ranks,
        BLOCK=max(128, 1024 // ranks),
        PARTS=parts,
        STARTS=triton.next_power_of_2(len(starts)),
        num_warps=4,
    )


def expand(
    inputs: Any,
    factors: Any,
    out: Any,
    slots: Any,
    starts: Any,
    *,
    begins: Any,
    sizes: Any,
    largest: int,
    are_equal: bool,
    is_added: bool,
) -> None:
    """`begins` and `sizes` locate the parts in `out`: numbers for one part, else tensors."""
    inputs = inputs.contiguous()  # inputs gathered from layers cut over GPUs may not be
    first, addresses = factors
    num_slots, rank = first.shape[0], first.shape[-1]
    parts, num_tokens = inputs.shape[0], inputs.shape[1]
    ranks = triton.next_power_of_2(rank)
    block = max(128, 1024 // ranks)
    _expand_kernel[(num_tokens, triton.cdiv(largest, block), parts)](
        inputs,
        addresses,
        out,
        slots,
        starts,
        len(starts),
        begins,
        sizes,
        num_slots,
        inputs.stride(0),
        inputs.stride(1),
        out.stride(0),
        RANK=rank,
        RANKS=ranks,
        BLOCK=block,
        PARTS=parts,
        ARE_EQUAL=are_equal,
        IS_ADDED=is_added,
        STARTS=triton.next_power_of_2(len(starts)),
        num_warps=4,
    )


@cache
def agree(device: Any) -> bool:
    """True if the kernels match plain products on this device: an untested Triton or GPU is not
    trusted. Called in the first pass, before anything is captured."""
    import torch

    def numbers(*shape: int) -> Any:
        count = torch.arange(math.prod(shape), dtype=torch.float32)
        return torch.sin(count + len(shape)).view(shape).to(device, torch.bfloat16)

    def addresses(stacks: list[Any]) -> Any:
        return torch.tensor([s.data_ptr() for s in stacks], dtype=torch.uint64).to(device)

    rank, sizes = 8, (48, 200)
    x, a, b = numbers(3, 72), [numbers(2, rank, 72)] * 2, [numbers(2, n, rank) for n in sizes]
    slots = torch.tensor([1, 0, 1], dtype=torch.int32).to(device)
    starts = torch.tensor([0, 1, 2, 0], dtype=torch.int32).to(device)  # two tokens have a slot
    hidden = torch.zeros(2, 3, rank).to(device)
    out = torch.zeros(3, sum(sizes), dtype=torch.bfloat16).to(device)
    begins, ends = (torch.tensor(n).to(device) for n in ([0, 48], sizes))
    try:
        shrink(x, (a[0], addresses(a)), hidden, slots, starts, parts=2, scaling=0.5)
        expand(
            hidden, (b[0], addresses(b)), out, slots, starts,
            begins=begins, sizes=ends, largest=max(sizes), are_equal=False, is_added=True,
        )  # fmt: skip
    except Exception:  # on any compiler error, vLLM's own kernels stay
        logger.warning("adapters are computed by vLLM's own kernels", exc_info=True)
        return False
    wanted = torch.zeros_like(out, dtype=torch.float32)
    for token, slot in ((0, 1), (1, 0)):
        inner = [0.5 * one[slot].float() @ x[token].float() for one in a]
        moved = [one[slot].float() @ h for one, h in zip(b, inner, strict=True)]
        wanted[token] = torch.cat(moved)
    is_right = torch.allclose(out.float(), wanted, atol=0.05, rtol=0.02)
    if not is_right:
        logger.warning("own kernels compute something else here: adapters are computed by vLLM's")
    return is_right


_SHRINK = (
    "inputs, lora_a_weights, output_tensor, token_lora_mapping, token_indices_sorted_by_lora_ids, "
    "num_tokens_per_lora, lora_token_start_loc, lora_ids, no_lora_flag_cpu, num_active_loras, "
    "scaling"
)
_EXPAND = _SHRINK.replace("lora_a_weights", "lora_b_weights").replace(
    "scaling", "offset_start, add_inputs"
)
"""Arguments of vLLM's operations in the supported versions."""


def install() -> bool:
    """Route vLLM's operations in this process through this file; True if that worked. Their names
    stay the same, and so does what vLLM compiles and captures."""
    import torch

    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        return False  # there, the choice of kernels must not depend on the batch
    try:
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils

        stock_shrink, stock_expand = lora_shrink_op._lora_shrink, lora_expand_op._lora_expand
        addresses_a, addresses_b = utils._get_lora_a_ptr, utils._get_lora_b_ptr
    except (ImportError, AttributeError):  # another version
        return False
    for name, known in (("lora_shrink", _SHRINK), ("lora_expand", _EXPAND)):
        operation = getattr(torch.ops.vllm, name, None)
        taken = operation.default._schema.arguments if operation else ()
        if ", ".join(argument.name for argument in taken) != known:
            return False

    def lora_shrink(*args: Any) -> None:
        inputs, weights, out, slots, _, _, starts, _, has_none, _, scaling = args
        rank, num_slots = weights[0].shape[-2], weights[0].shape[0]
        is_own = is_for(inputs.shape[0], rank=rank, num_slots=num_slots)
        if not (agree(inputs.device) and is_own):
            stock_shrink(*args)
        elif not has_none.item():
            factors = weights[0], addresses_a(weights, inputs.device)[0]
            shrink(inputs, factors, out, slots, starts, parts=len(weights), scaling=scaling)

    def lora_expand(*args: Any) -> None:
        inputs, weights, out, slots, _, _, starts, _, has_none, _, begin, is_added = (
            *args, 0, False
        )[:12]  # fmt: skip
        rank, num_slots = weights[0].shape[-1], weights[0].shape[0]
        is_own = is_for(inputs.shape[1], rank=rank, num_slots=num_slots)
        if not (agree(inputs.device) and is_own):
            stock_expand(*args)
        elif not has_none.item():
            begins, factors, *_, sizes, are_equal, largest = addresses_b(
                weights, begin, inputs.device
            )
            expand(
                inputs, (weights[0], factors), out, slots, starts,
                begins=begins, sizes=sizes, largest=largest, are_equal=are_equal, is_added=is_added,
            )  # fmt: skip

    library = torch.library.Library("vllm", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns of the override itself
        warnings.simplefilter("ignore")
        for name, operation in (("lora_shrink", lora_shrink), ("lora_expand", lora_expand)):
            library.impl(name, operation, "CUDA", allow_override=True)  # type: ignore[no-untyped-call]
    _kept.append(library)  # releasing it undoes the override
    return True


_kept: list[Any] = []
