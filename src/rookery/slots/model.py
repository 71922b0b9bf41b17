"""A Hugging Face causal LM over packed rows, its linear layers slotted.

    model = load_model(Path("~/models/qwen"), device="cpu")
    hidden = model.embed(tokens)                                  # [rows, hidden]
    hidden = model.layers(hidden, positions, attend=..., rows=...)  # all layers, or a range
    logits = model.logits(hidden)                                 # [rows, vocabulary]

The layers are transformers' own, until `pack` replaces known ones by fused ones. This module runs
embedding, layers, norm and head. A model whose forward pass does more is refused at loading, where
a probe compares the logits with transformers'.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rookery.errors import AdapterError, ModelError, boundary
from rookery.model_names import is_named
from rookery.slots.attention import (
    Attend,
    CausalAttend,
    HeadsSeen,
    PositionProbe,
    agree,
    takes_varlen,
)
from rookery.slots.fusion import FusedLayer, Rotation, fuse
from rookery.slots.linear import (
    FLOAT32,
    ActiveRows,
    Packing,
    SlottedLinear,
    drop_pages,
)
from rookery.slots.rows import PositionEncoding, SlotRows
from rookery.types import Adapter, LoraFactors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelShape", "SlotBank", "SlottedModel", "decoder_layer", "first_adapted_layer"]


class SlotBank:
    """Slots 0, 1, 2, ... across all slotted layers of a model.

    Every adapted layer has the same number of slots, a power of two. So loading many adapters
    reallocates rarely, and a slot number is valid in every adapted layer.
    """

    def __init__(self, layers: Mapping[str, SlottedLinear], *, base_names: frozenset[str]) -> None:
        self._layers = layers
        self._base_names = base_names
        self._num_slots = 1

    def check(self, adapter: Adapter, *, max_rank: int) -> None:
        """Raise AdapterError unless the adapter fits: base, rank, targets, shapes, values."""
        who = f"adapter {adapter.name!r}"
        if adapter.base and not is_named(adapter.base, self._base_names):
            raise AdapterError(
                f"{who} was made for {adapter.base!r}, this model is "
                f"{' or '.join(sorted(self._base_names))}: load it on its own base model, or "
                "correct base_model_name_or_path in its adapter_config.json if they are the same."
            )
        if adapter.rank > max_rank:
            raise AdapterError(
                f"{who} has rank {adapter.rank}, at most {max_rank} is allowed: raise max_rank or "
                "reduce its rank."
            )
        if not adapter.factors:
            raise AdapterError(f"{who} adapts no layer.")
        for name, factors in adapter.factors.items():
            self._check_layer(who, name, factors)

    def _check_layer(self, who: str, name: str, factors: LoraFactors) -> None:
        layer = self._layers.get(name)
        if layer is None:
            near = difflib.get_close_matches(name, self._layers, n=1)
            hint = f" The nearest is {near[0]}." if near else ""
            raise AdapterError(f"{who} adapts {name}, which is not a linear layer here.{hint}")
        expected = (layer.in_features, layer.out_features)
        got = (factors.a.shape[1], factors.b.shape[0])
        if got != expected or factors.a.shape[0] != factors.b.shape[1]:
            raise AdapterError(
                f"{who}: {name} has A {tuple(factors.a.shape)} and B {tuple(factors.b.shape)}; "
                f"this model needs [r, {expected[0]}] and [{expected[1]}, r]."
            )
        for factor, tensor in (("lora_A", factors.a), ("lora_B", factors.b)):
            if not torch.isfinite(tensor).all():
                raise AdapterError(f"{who}: {name}.{factor} holds NaN or infinity.")

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write a checked adapter into a slot. The scale is folded into B."""
        self.clear(slot)
        self._num_slots = max(self._num_slots, 1 << slot.bit_length())
        for name, layer in self._layers.items():
            if name in adapter.factors or layer.a is not None:
                rank = adapter.factors[name].a.shape[0] if name in adapter.factors else 0
                layer.reserve(num_slots=self._num_slots, rank=rank)
        for name, factors in adapter.factors.items():
            self._layers[name].put(slot, factors)

    def clear(self, slot: int) -> None:
        """Zero a slot; rows that still use it compute the base model."""
        for layer in self._layers.values():
            layer.clear(slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes by which engines and trainers plan their memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    eos_tokens: tuple[int, ...]
    beyond_context: str = "shorten it"
    """Remedy for more than `context_tokens` tokens, as the end of an error message."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one cached token: all layers' keys and values and a hidden state."""
        values = self.num_layers * 2 * self.num_kv_heads * self.head_dim + self.hidden_size
        return values * dtype.itemsize


class SlottedModel:
    """Runs a model's parts over packed rows; `bank` holds its adapter slots."""

    def __init__(
        self, model: "PreTrainedModel", *, names: frozenset[str], context_tokens: int | None = None
    ) -> None:
        """If `context_tokens` is None, it is determined from the position encoding."""
        self.is_exact = False
        """Whether training and decoding give a row the same bits, see `load_model`."""
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._positions = PositionEncoding(self._decoder)
        self.shape = _shape(model, self._positions, context_tokens)
        self._norm: Any = getattr(
            self._decoder, "norm", getattr(self._decoder, "final_layernorm", None)
        )
        self._softcap: float | None = getattr(self._decoder.config, "final_logit_softcapping", None)
        self._active = ActiveRows()
        self._fused: list[FusedLayer] | None = None
        self._packing = FLOAT32
        self.linears = self._slot_linears()
        self.bank = SlotBank(self.linears, base_names=names)

    def _slot_linears(self) -> dict[str, SlottedLinear]:
        linears = {}
        for name, module in list(self._model.named_modules()):
            if isinstance(module, nn.Linear):
                parent_name, _, child = name.rpartition(".")
                parent = self._model.get_submodule(parent_name) if parent_name else self._model
                linears[name] = SlottedLinear(module, name=name, active=self._active)
                setattr(parent, child, linears[name])
        self._head = linears["lm_head"]
        return linears

    def pack(self, packing: Packing = FLOAT32) -> None:
        """Pack the weights for CPU inference; the model has no gradients afterwards."""
        self._packing = packing
        self._fused = self._agreeing_fusion()
        for layer, plain in zip(self._fused or (), self._decoder.layers, strict=False):
            weights = list(plain.parameters())
            layer.pack(packing.layers)
            if packing is not FLOAT32:  # float32 copies would be as large as the weights
                drop_pages(weights)
        tied = self._decoder.embed_tokens.weight
        for linear in self.linears.values():
            if linear.weight is not None:
                product = packing.head if linear is self._head else packing.layers
                linear.pack(keep_weight=linear.weight is tied, product=product)
        for weight in self.weights.values():
            # Remaining weights may lie in a mapped file, which would stay in memory as a whole.
            weight.data = weight.data.clone()

    @property
    def takes_varlen(self) -> bool:
        """Whether torch's varlen kernel can attend this model's sequences in one call."""
        config = self._decoder.config
        is_capped = getattr(config, "attn_logit_softcapping", None) is not None
        return not is_capped and takes_varlen(self.device, self.dtype, head_dim=self.shape.head_dim)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, recognised by stacked expert weights."""
        return any(weight.dim() == 3 for weight in self.weights.values())

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Unpacked base weights by their names in the model's folder; tied weights occur once."""
        slots = {id(t) for linear in self.linears.values() for t in (linear.a, linear.b)}
        return {n: p for n, p in self._model.named_parameters() if id(p) not in slots}

    @torch.no_grad()
    def set_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all base weights; a packed model is packed again.

        If they do not fit (`check_weights`), nothing changes.
        """
        is_packed = any(linear.weight is None for linear in self.linears.values())
        self.check_weights(tensors)
        for name, parameter in self.weights.items():
            parameter.copy_(tensors[name])
        if not is_packed:
            return
        tied = self._decoder.embed_tokens.weight
        for name, linear in self.linears.items():
            stored = tensors.get(f"{name}.weight")
            weight = stored if stored is None else stored.to(device=self.device, dtype=self.dtype)
            linear.unpack(tied if weight is None else nn.Parameter(weight, requires_grad=False))
        self._fused = None
        self.pack(self._packing)

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ModelError unless names and shapes equal those of this model's weights."""
        shapes = {name: tuple(p.shape) for name, p in self.weights.items()}
        for name, linear in self.linears.items():
            if linear.weight is None:
                shapes[f"{name}.weight"] = (linear.out_features, linear.in_features)
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wrong = sorted(n for n in shapes.keys() | got.keys() if shapes.get(n) != got.get(n))
        if wrong:
            raise ModelError(
                f"These are not weights of this model: {wrong[0]} is {got.get(wrong[0])} and "
                f"here {shapes.get(wrong[0])}. Give the weights of a model of the same shape."
            )

    def write(self, folder: Path, *, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a folder that transformers loads, with this config and the given weights."""
        with boundary(ModelError, f"writing the model folder {folder}"):
            self._model.save_pretrained(folder, state_dict=dict(tensors))
            for file in folder.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors writes 0600, but a server may run as another user

    @property
    def module(self) -> nn.Module:
        """The underlying transformers model, for wrappers."""
        module: nn.Module = self._model
        return module

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return list(self._decoder.layers)

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def _agreeing_fusion(self) -> list[FusedLayer] | None:
        """Return the fused layers if they agree with transformers' own layers; else None."""
        probe = PositionProbe(self.shape.vocab_size, self.shape.context_tokens, device=self.device)
        attend = HeadsSeen(CausalAttend(probe.lengths, device=self.device))
        indices = range(self.shape.num_layers)
        with torch.inference_mode():
            hidden = self.embed(probe.tokens.flatten())
            positions = probe.positions.flatten()
            rope = self._positions(hidden[None], positions[None])
            expected = self._run(hidden, indices, positions, rope, attend)
            fused = fuse(self._decoder.layers, attend.heads, active=self._active)
            if fused is None or any(c.shape[-1] != self.shape.head_dim for c, _ in rope.values()):
                return None
            got = self._run_fused(fused, hidden, indices, rope, attend)
        return fused if agree(got, expected, dtype=self.dtype) else None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens: [rows] -> [rows, hidden], with the scale that some architectures apply."""
        hidden: torch.Tensor = self._decoder.embed_tokens(tokens)
        return hidden

    def layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        *,
        attend: Attend,
        rows: SlotRows | Sequence[SlotRows] | None = None,
        span: range | None = None,
    ) -> torch.Tensor:
        """Run the layers of `span` (all by default) over packed rows. With several `rows`, a packed
        row gets the adapters of every plan that contains it."""
        rope = self._positions(hidden[None], positions[None])
        indices = span if span is not None else range(self.shape.num_layers)
        with self._rows(rows):
            if self._fused is not None:
                return self._run_fused(self._fused, hidden, indices, rope, attend)
            return self._run(hidden, indices, positions, rope, attend)

    def _run(
        self,
        hidden: torch.Tensor,
        indices: range,
        positions: torch.Tensor,
        rope: dict[str, Any],
        attend: Attend,
    ) -> torch.Tensor:
        states = hidden[None]
        for index in indices:
            states = self._decoder.layers[index](
                states,
                attention_mask=None,
                position_ids=positions[None],
                position_embeddings=rope[self._positions.kind(index)],
                past_key_values=None,
                attend=attend,
            )
        return states[0]

    def _run_fused(
        self,
        layers: list[FusedLayer],
        hidden: torch.Tensor,
        indices: range,
        rope: dict[str, Any],
        attend: Attend,
    ) -> torch.Tensor:
        rotations = {kind: Rotation(cos, sin) for kind, (cos, sin) in rope.items()}
        for index in indices:
            hidden = layers[index](hidden, rotations[self._positions.kind(index)], attend)
        return hidden

    def logits(
        self, hidden: torch.Tensor, *, rows: SlotRows | Sequence[SlotRows] | None = None
    ) -> torch.Tensor:
        """Apply the final norm and the head: [rows, hidden] -> float32 [rows, vocabulary]."""
        with self._rows(rows):
            logits: torch.Tensor = self._head(self._norm(hidden[None]))[0].float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @contextmanager
    def _rows(self, rows: SlotRows | Sequence[SlotRows] | None) -> Iterator[None]:
        self._active.rows = () if rows is None else (rows,) if isinstance(rows, SlotRows) else rows
        try:
            yield
        finally:
            self._active.rows = ()


def first_adapted_layer(names: Iterator[str] | list[str], *, num_layers: int) -> int:
    """Return the lowest decoder layer of the named linear layers, or else `num_layers`."""
    return min((decoder_layer(name, default=num_layers) for name in names), default=num_layers)


def decoder_layer(name: str, *, default: int) -> int:
    """Return the decoder layer of a weight or linear layer; `default` if it is in none."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return int(match[1]) if match else default


def _shape(
    model: "PreTrainedModel", positions: PositionEncoding, context_tokens: int | None
) -> ModelShape:
    config = model.config.get_text_config()
    declared: int = config.max_position_embeddings
    if context_tokens is None:
        context_tokens = positions.fixed_tokens(declared)
    heads = config.num_attention_heads
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_tokens=context_tokens,
        beyond_context="shorten it"
        if context_tokens == declared
        else "shorten it, or serve the model with vLLM; in longer sequences its position encoding "
        "changes for every token",
        eos_tokens=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )
