"""Attention over packed rows, plugged into transformers under the name `rookery`.

A decoder layer computes queries, keys and values of all packed rows and hands them to the
`Attend` of the forward pass: the engine's reads its KV cache, `CausalAttend` below is the plain
one for whole sequences, with gradients.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION", "Attend", "CausalAttend", "Heads", "attend_heads", "causal_mask"]

ATTENTION = "rookery"
"""The `attn_implementation` that models are loaded with."""


class Heads:
    """What one layer's attention needs beside its tensors."""

    __slots__ = ("layer", "scale", "softcap", "window")

    def __init__(
        self, *, layer: int, scale: float, softcap: float | None, window: int | None
    ) -> None:
        self.layer = layer
        self.scale = scale
        self.softcap = softcap
        self.window = window


class Attend(Protocol):
    """Mixes the rows of one layer: q [rows, H, D], kv [rows, 2, KV, D] -> [rows, H, D]."""

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor: ...


class CausalAttend:
    """Whole sequences laid end to end; each row sees the rows of its own sequence before it."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        self._lengths = list(lengths)
        self._device = device

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        parts = []
        for q_part, kv_part in zip(
            torch.split(q, self._lengths), torch.split(kv, self._lengths), strict=True
        ):
            positions = torch.arange(len(q_part), device=self._device)
            mask = causal_mask(positions, len(q_part), window=heads.window, dtype=q.dtype)
            k, v = kv_part.permute(1, 2, 0, 3)
            mixed = attend_heads(q_part.transpose(0, 1)[None], k[None], v[None], mask, heads)
            parts.append(mixed[0].transpose(0, 1))
        return torch.cat(parts)


def causal_mask(
    positions: torch.Tensor, num_keys: int, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [..., queries, keys]: a query sees keys up to itself, `window` of them."""
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
    """q [N, H, Q, D] against k, v [N, KV, K, D] under an additive mask; grouped heads allowed."""
    if heads.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=heads.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    logits = torch.tanh(q @ k.transpose(-1, -2) * (heads.scale / heads.softcap)) * heads.softcap
    return torch.softmax(logits + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


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
    """The signature transformers calls; `attend` travels through the layers' keyword arguments."""
    del attention_mask
    if attend is None:
        raise TypeError("they do not pass keyword arguments on to their attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads = Heads(layer=layer, scale=scaling, softcap=softcap, window=sliding_window)
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    return attend(query[0].transpose(0, 1), kv, heads)[None], None


AttentionInterface.register(ATTENTION, _forward)
AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)
