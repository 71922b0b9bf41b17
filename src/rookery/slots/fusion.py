"""Decoder layers of the Llama kind in fewer, larger operations than transformers runs them.

At a few rows a layer's time goes into the number of calls: here queries, keys and values are one
product and one rotation, gate and up are one product. `fuse` recognises such layers by their
parts; the model compares the result with transformers' own pass before it is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rookery.slots.attention import Attend, Heads
from rookery.slots.linear import ActiveRows, LinearGroup

__all__ = ["FusedLayer", "Rotation", "fuse"]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Rotation:
    """Rotary positions of packed rows: cosines, and sines signed for the swapped halves."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = cos.shape[-1] // 2
        self._cos = cos[0, :, None]
        self._sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), dim=-1)
        self._half = half

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, D], turned."""
        return torch.addcmul(x * self._cos, torch.roll(x, self._half, -1), self._sin)


class FusedLayer:
    """One decoder layer over packed rows: hidden [rows, hidden] -> [rows, hidden]."""

    def __init__(self, layer: Any, heads: Heads, *, active: ActiveRows) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._heads = heads
        self._head_dim: int = attention.head_dim
        self._num_kv: int = attention.k_proj.out_features // self._head_dim
        self._num_queries: int = attention.q_proj.out_features // self._head_dim
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self._qkv = LinearGroup(
            [attention.q_proj, attention.k_proj, attention.v_proj], active=active
        )
        self._o = LinearGroup([attention.o_proj], active=active)
        self._gate_up = LinearGroup([mlp.gate_proj, mlp.up_proj], active=active)
        self._down = LinearGroup([mlp.down_proj], active=active)
        self._activate: nn.Module = mlp.act_fn

    def pack(self, *, fast_alone: bool) -> None:
        """Lay the weights out for CPU inference."""
        for group in (self._qkv, self._o, self._gate_up, self._down):
            group.pack(fast_alone=fast_alone)

    def __call__(self, hidden: torch.Tensor, rotate: Rotation, attend: Attend) -> torch.Tensor:
        before_attention, before_mlp = self._norms
        hidden = hidden + self._attention(_norm(hidden, before_attention), rotate, attend)
        gate, up = self._gate_up(_norm(hidden, before_mlp)).chunk(2, dim=-1)
        return hidden + self._down(self._activate(gate) * up)

    def _attention(self, x: torch.Tensor, rotate: Rotation, attend: Attend) -> torch.Tensor:
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        num_rotated = self._num_queries + self._num_kv
        qk = rotate(self._normed_heads(qkv[:, :num_rotated])).transpose(0, 1)
        mixed = attend(
            qk[: self._num_queries],
            qk[self._num_queries :],
            qkv[:, num_rotated:].transpose(0, 1),
            self._heads,
        )
        return self._o(mixed.transpose(0, 1).reshape(len(x), -1))

    def _normed_heads(self, qk: torch.Tensor) -> torch.Tensor:
        q_norm, k_norm = self._head_norms
        if q_norm is None or k_norm is None:
            return qk
        q, k = qk[:, : self._num_queries], qk[:, self._num_queries :]
        return torch.cat((_norm(q, q_norm), _norm(k, k_norm)), dim=1)


def fuse(
    layers: Sequence[nn.Module], heads: Sequence[Heads], *, active: ActiveRows
) -> list[FusedLayer] | None:
    """The same layers, fused; None if some layer has other parts."""
    if not all(_has_known_parts(layer) for layer in layers):
        return None
    return [FusedLayer(x, y, active=active) for x, y in zip(layers, heads, strict=True)]


def _has_known_parts(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention = {name for name, _ in layer.self_attn.named_children()}
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(layer.self_attn, name) for name in attention & _HEAD_NORMS]
    return (
        attention in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and {name for name, _ in layer.mlp.named_children()} == _MLP
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
    )


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
