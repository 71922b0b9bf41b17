"""Llama-like decoder layers in fewer, larger operations than in transformers.

For few rows, a layer's time depends on the number of calls. Here queries, keys and values are one
product and one rotation, and gate and up are one product. `fuse` recognises such layers by their
parts; the model compares the result with transformers' own pass before using it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rookery.slots.attention import Attend, Heads
from rookery.slots.linear import ActiveRows, LinearGroup, MakeProduct

__all__ = ["FusedLayer", "Rotation", "fuse"]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Rotation:
    """Rotary position encoding of packed rows: cosines, and sines signed for swapped halves."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._half = cos.shape[-1] // 2
        self._cos = cos[0, :, None]
        self._sin = torch.cat(
            (-sin[0, :, None, : self._half], sin[0, :, None, self._half :]), dim=-1
        )
        self._tables: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, qkv: torch.Tensor, *, num_turned: int) -> torch.Tensor:
        """Rotate the first `num_turned` heads of qkv [rows, heads, D]; keep the others."""
        cos, sin = self._table(num_turned, qkv.shape[1] - num_turned)
        return torch.addcmul(qkv * cos, torch.roll(qkv, self._half, -1), sin)

    def _table(self, num_turned: int, num_still: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors for all heads: times 1 plus 0 for values, which saves a copy of them."""
        table = self._tables.get((num_turned, num_still))
        if table is None:
            still = self._cos.new_zeros(len(self._cos), num_still, self._cos.shape[-1])
            table = self._tables[num_turned, num_still] = (
                torch.cat((self._cos.expand(-1, num_turned, -1), still + 1), dim=1),
                torch.cat((self._sin.expand(-1, num_turned, -1), still), dim=1),
            )
        return table


class FusedLayer:
    """One decoder layer over packed rows: hidden [rows, hidden] -> [rows, hidden]."""

    def __init__(self, layer: Any, heads: Heads, *, active: ActiveRows) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._heads = heads
        self._head_dim: int = attention.head_dim
        self._num_kv: int = attention.k_proj.out_features // self._head_dim
        self._num_queries: int = attention.q_proj.out_features // self._head_dim
        self._norms = (_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm))
        self._head_norms = (
            (_Norm(attention.q_norm), _Norm(attention.k_norm))
            if hasattr(attention, "q_norm")
            else None
        )
        self._qkv = LinearGroup(
            [attention.q_proj, attention.k_proj, attention.v_proj], active=active
        )
        self._o = LinearGroup([attention.o_proj], active=active)
        self._gate_up = LinearGroup([mlp.gate_proj, mlp.up_proj], active=active)
        self._down = LinearGroup([mlp.down_proj], active=active)
        self._activate: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn.forward

    def pack(self, product: MakeProduct) -> None:
        for group in (self._qkv, self._o, self._gate_up, self._down):
            group.pack(product)

    def __call__(self, hidden: torch.Tensor, rotate: Rotation, attend: Attend) -> torch.Tensor:
        before_attention, before_mlp = self._norms
        hidden = hidden + self._attention(before_attention(hidden), rotate, attend)
        gate, up = self._gate_up(before_mlp(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activate(gate) * up)

    def _attention(self, x: torch.Tensor, rotate: Rotation, attend: Attend) -> torch.Tensor:
        num_q, num_kv, size = self._num_queries, self._num_kv, self._head_dim
        qkv = self._normed_heads(self._qkv(x).view(len(x), -1, size))
        q, kv = rotate(qkv, num_turned=num_q + num_kv).tensor_split((num_q,), dim=1)
        mixed = attend(q, kv.view(len(x), 2, num_kv, size), self._heads)
        return self._o(mixed.reshape(len(x), num_q * size))

    def _normed_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        if self._head_norms is None:
            return qkv
        q_norm, k_norm = self._head_norms
        ends = (self._num_queries, self._num_queries + self._num_kv)
        q, k, v = qkv.tensor_split(ends, dim=1)
        return torch.cat((q_norm(q), k_norm(k), v), dim=1)


class _Norm:
    """RMS norm as x w sqrt(D) / hypot(|x|, sqrt(D eps)), with half the operations."""

    def __init__(self, norm: Any) -> None:
        size = norm.weight.shape[-1]
        self._weight = norm.weight.detach() * math.sqrt(size)
        self._least = self._weight.new_tensor(math.sqrt(size * norm.variance_epsilon))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x * self._weight, torch.hypot(length, self._least))


def fuse(
    layers: Sequence[nn.Module], heads: Sequence[Heads], *, active: ActiveRows
) -> list[FusedLayer] | None:
    """Return the layers fused; None if a layer has unknown parts."""
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
