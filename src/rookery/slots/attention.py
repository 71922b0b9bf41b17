"""Attention over packed rows, plugged into transformers under the name `rookery`.

A decoder layer passes queries, keys and values of all packed rows to the `Attend` of the forward
pass. The engine's reads a KV cache; `CausalAttend` handles whole sequences, with gradients.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "ATTENTION",
    "KEY_BLOCK",
    "Attend",
    "CausalAttend",
    "Heads",
    "HeadsSeen",
    "PositionProbe",
    "agree",
    "any_follows",
    "attend_alike",
    "attend_heads",
    "attend_varlen",
    "causal_mask",
    "gap",
    "has_varlen",
    "register",
    "takes_varlen",
]


ATTENTION = "rookery"
"""`attn_implementation` under which models are loaded."""

KEY_BLOCK = 16
"""The number of keys per call is a multiple of this. The kernel sums a shorter tail in another
order, and a row's bits would depend on other rows."""

_MAX_VARLEN_HEAD = 256
"""Largest head size of torch's varlen kernel."""


class Heads:
    """Parameters of one layer's attention."""

    __slots__ = ("layer", "scale", "softcap", "window")

    def __init__(
        self, *, layer: int, scale: float, softcap: float | None, window: int | None
    ) -> None:
        self.layer = layer
        self.scale = scale
        self.softcap = softcap
        self.window = window


class Attend(Protocol):
    """Attention of one layer: q [rows, H, D], kv [rows, 2, KV, D] -> [rows, H, D]."""

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor: ...


class CausalAttend:
    """Causal attention over whole sequences laid end to end.

    Neighbours of equal length share one call, so sort sequences by length. A sequence's result does
    not depend on the others. With `is_exact` its bits equal those of decoding.

    `follows` gives per sequence the index of a sequence whose rows it also sees, or None. A common
    prefix of several answers is then computed once.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        device: torch.device,
        is_exact: bool = False,
        follows: Sequence[int | None] = (),
    ) -> None:
        self._is_exact = is_exact
        self._lengths = lengths
        self._keys = _Keys(lengths, follows, device=device) if any_follows(follows) else None
        self._runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        self._rows = [length * count for length, count in self._runs]
        self._device = device
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        if self._keys is not None:
            return self._following(q, kv, heads, self._keys)
        if len(self._runs) > 1 and has_varlen(q, heads):
            longest = max(self._lengths)
            return attend_varlen(q, kv, (self._ends, self._ends), (longest, longest), heads)
        parts = [
            self._run(*run, q_part, kv_part, heads)
            for run, q_part, kv_part in zip(
                self._runs,
                torch.split(q, self._rows),
                torch.split(kv, self._rows),
                strict=True,
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(
        self, length: int, count: int, q: torch.Tensor, kv: torch.Tensor, heads: Heads
    ) -> torch.Tensor:
        """`count` sequences of one length: q [count * length, H, D] -> the same shape."""
        q_N = q.view(count, length, *q.shape[1:]).transpose(1, 2)
        k_N, v_N = kv.view(count, length, *kv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        if self._is_exact:
            mixed = self._as_decoded(q_N, k_N, v_N, heads)
        elif heads.softcap is not None:
            mixed = attend_heads(q_N, k_N, v_N, self._mask(length, heads, q.dtype), heads)
        else:
            # Repeat heads explicitly: on the CPU `enable_gqa` disables the fast kernel.
            groups = q_N.shape[1] // k_N.shape[1]
            k_N, v_N = (x.repeat_interleave(groups, dim=1) for x in (k_N, v_N))
            is_cut = heads.window is not None and heads.window < length
            mixed = functional.scaled_dot_product_attention(
                q_N,
                k_N,
                v_N,
                attn_mask=self._mask(length, heads, q.dtype) if is_cut else None,
                is_causal=not is_cut,
                scale=heads.scale,
            )
        return mixed.transpose(1, 2).reshape(q.shape)

    def _as_decoded(
        self, q_N: torch.Tensor, k_N: torch.Tensor, v_N: torch.Tensor, heads: Heads
    ) -> torch.Tensor:
        length = q_N.shape[2]
        room = -length % KEY_BLOCK
        k_N, v_N = (functional.pad(x, (0, 0, 0, room)) for x in (k_N, v_N))
        mask = self._mask(length, heads, q_N.dtype, num_keys=length + room)
        return attend_alike(q_N, k_N, v_N, mask, heads)

    def _mask(
        self, length: int, heads: Heads, dtype: torch.dtype, *, num_keys: int | None = None
    ) -> torch.Tensor:
        mask = self._masks.get((length, heads.window))
        if mask is None:
            positions = torch.arange(length, device=self._device)
            mask = causal_mask(positions, num_keys or length, window=heads.window, dtype=dtype)
            self._masks[length, heads.window] = mask
        return mask

    def _following(
        self, q: torch.Tensor, kv: torch.Tensor, heads: Heads, keys: "_Keys"
    ) -> torch.Tensor:
        kv = kv.index_select(0, keys.rows)
        if has_varlen(q, heads):
            longest = max(self._lengths), max(keys.lengths)
            return attend_varlen(q, kv, (self._ends, keys.ends), longest, heads)
        parts = zip(torch.split(q, list(self._lengths)), torch.split(kv, keys.lengths), strict=True)
        return torch.cat([_attend_last(q_part, kv_part, heads) for q_part, kv_part in parts])


def any_follows(follows: Sequence[int | None]) -> bool:
    return any(place is not None for place in follows)


class _Keys:
    """The rows that each sequence sees, end to end: those it follows, then its own."""

    def __init__(
        self, lengths: Sequence[int], follows: Sequence[int | None], *, device: torch.device
    ) -> None:
        starts = [0, *accumulate(lengths)]
        rows: list[int] = []
        self.lengths: list[int] = []
        for place, (length, before) in enumerate(zip(lengths, follows, strict=True)):
            num_before = len(rows)
            if before is not None:
                rows.extend(range(starts[before], starts[before] + lengths[before]))
            rows.extend(range(starts[place], starts[place] + length))
            self.lengths.append(len(rows) - num_before)
        self.rows = torch.tensor(rows, device=device)
        ends = [0, *accumulate(self.lengths)]
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)


def _attend_last(q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Attend causally with q [rows, H, D], the last rows of kv [keys, 2, KV, D]."""
    num_keys = len(kv)
    positions = torch.arange(num_keys - len(q), num_keys, device=q.device)
    mask = causal_mask(positions, num_keys, window=heads.window, dtype=q.dtype)
    k_N, v_N = kv.permute(1, 2, 0, 3)[:, None].unbind()
    return attend_heads(q.transpose(0, 1)[None], k_N, v_N, mask, heads)[0].transpose(0, 1)


def has_varlen(q: torch.Tensor, heads: Heads) -> bool:
    """Return whether torch has a kernel for sequences of unequal lengths in one call."""
    return heads.softcap is None and takes_varlen(q.device, q.dtype, head_dim=q.shape[-1])


def takes_varlen(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> bool:
    """`has_varlen` for layers without a soft cap."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and is_half and head_dim <= _MAX_VARLEN_HEAD


def attend_varlen(
    q: torch.Tensor,
    kv: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    heads: Heads,
) -> torch.Tensor:
    """Attend with q [rows, H, D] to kv [keys, 2, KV, D]; requires `has_varlen`. Sequences lie end
    to end; `ends` are the cumulative counts of queries and of keys, from 0. The queries of a
    sequence belong to its last keys."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds; only GPUs have a kernel

    k, v = kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2).unbind(1)
    left = -1 if heads.window is None or heads.window >= longest[1] else heads.window - 1
    mixed = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        *ends,
        *longest,
        scale=heads.scale,
        window_size=(left, 0),
    )
    assert isinstance(mixed, torch.Tensor), "no second result was asked for"
    return mixed


def causal_mask(
    positions: torch.Tensor, num_keys: int, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return an additive mask [..., queries, keys]: a query sees keys up to itself, the last
    `window` if set."""
    keys = torch.arange(num_keys, device=positions.device)
    distance = positions[..., None] - keys
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~seen, float("-inf"))


def attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """Attend with q [N, H, Q, D] to k, v [N, KV, K, D] under an additive mask; KV divides H."""
    if heads.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=heads.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    logits = torch.tanh(q @ k.transpose(-1, -2) * (heads.scale / heads.softcap)) * heads.softcap
    return torch.softmax(logits + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def attend_alike(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """Like `attend_heads`, with bits that do not depend on the number of queries. A single query
    would use another kernel, so a second one is added."""
    if q.shape[2] > 1:
        return attend_heads(q, k, v, mask, heads)
    return attend_heads(torch.cat((q, torch.zeros_like(q)), dim=2), k, v, mask, heads)[:, :, :1]


def register() -> None:
    """Register this attention with transformers, before a model is loaded. Takes seconds."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _forward)
    AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attend: Attend | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Has transformers' signature; `attend` arrives through the layers' keyword arguments."""
    del attention_mask
    if attend is None:
        raise TypeError("they do not pass keyword arguments on to their attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads = Heads(layer=layer, scale=scaling, softcap=softcap, window=sliding_window)
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    return attend(query[0].transpose(0, 1), kv, heads)[None], None


_NUM_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Accepted difference as a fraction of the largest logit, for kernels that sum in other orders."""


class PositionProbe:
    """Short input on which two implementations of a model must agree: the same tokens at the start
    and at the end of the context, [2, tokens]. Layers that change with position differ at the end.

    Tokens are spread over the vocabulary. Its first tokens are special in most models, and half
    precision rounds the logits after them ten times more.
    """

    def __init__(self, vocab_size: int, context_tokens: int, *, device: torch.device) -> None:
        first = torch.arange(_NUM_TOKENS, device=device)
        last = first + max(0, context_tokens - _NUM_TOKENS)
        self.tokens = ((first * first * 7919 + first * 104729) % vocab_size).expand(2, -1)
        self.positions = torch.stack((first, last))
        self.lengths = [_NUM_TOKENS, _NUM_TOKENS]


def gap(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> float:
    """Return the largest difference of logits [2 * tokens, vocabulary]. In half precision, where
    rounding is large at single positions, take the median over each sequence's positions first."""
    differences = (got - expected).abs().amax(dim=-1).view(2, -1)
    if dtype != torch.float32:
        differences = differences.median(dim=-1).values
    return differences.max().item()


def agree(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> bool:
    """Return whether two passes agree within the tolerance of `dtype`; False for NaN."""
    allowed = _TOLERANCE.get(dtype, 1e-3) * max(1.0, expected.abs().max().item())
    return gap(got, expected, dtype=dtype) <= allowed


class HeadsSeen:
    """An Attend that records the `Heads` of each call, in order."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.heads: list[Heads] = []

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        self.heads.append(heads)
        return self._attend(q, kv, heads)
