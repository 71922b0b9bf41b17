"""A Hugging Face causal LM over packed rows, its linear layers slotted.

    model = load_model(Path("~/models/qwen"), device="cpu")
    hidden = model.embed(tokens)                                  # [rows, hidden]
    hidden = model.layers(hidden, positions, attend=..., rows=...)  # all layers, or a range
    logits = model.logits(hidden)                                 # [rows, vocabulary]

The layers are transformers' own. Because their order is driven from here, a model whose forward
pass does more than embed, layers, norm, head is found out when it is loaded: a probe runs through
both and must agree.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rookery.errors import ModelError, boundary
from rookery.slots.attention import ATTENTION, Attend, CausalAttend
from rookery.slots.bank import SlotBank
from rookery.slots.linear import ActiveRows, SlottedLinear
from rookery.slots.rows import SlotRows

__all__ = ["ModelShape", "SlottedModel", "load_model"]

_PROBE_TOKENS = 12
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""How far probe logits may differ: other kernels sum in another order, a wrong pass is far off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers an engine or a trainer lays its memory out by."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    eos_tokens: tuple[int, ...]

    def token_bytes(self, dtype: torch.dtype) -> int:
        """What one cached token takes: its keys and values of all layers and a hidden state."""
        values = self.num_layers * 2 * self.num_kv_heads * self.head_dim + self.hidden_size
        return values * dtype.itemsize


class SlottedModel:
    """The model's parts, driven over packed rows; `bank` holds its adapter slots."""

    def __init__(self, model: PreTrainedModel, *, names: frozenset[str]) -> None:
        self.device = model.device
        self.dtype = model.dtype
        self.shape = _shape(model)
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._norm: Any = getattr(
            self._decoder, "norm", getattr(self._decoder, "final_layernorm", None)
        )
        self._layer_types: list[str] | None = None
        if "layer_type" in inspect.signature(self._decoder.rotary_emb.forward).parameters:
            self._layer_types = self._decoder.config.layer_types
        self._softcap: float | None = getattr(self._decoder.config, "final_logit_softcapping", None)
        self._active = ActiveRows()
        self.linears = self._slot_linears()
        self.bank = SlotBank(self.linears, base_names=names)

    def _slot_linears(self) -> dict[str, SlottedLinear]:
        linears = {}
        for name, module in list(self._model.named_modules()):
            if isinstance(module, nn.Linear):
                parent_name, _, child = name.rpartition(".")
                parent = self._model.get_submodule(parent_name) if parent_name else self._model
                linears[name] = SlottedLinear(module, active=self._active)
                setattr(parent, child, linears[name])
        self._head = linears["lm_head"]
        return linears

    def pack(self) -> None:
        """Lay the weights out for CPU inference; the model gives no gradients afterwards."""
        tied = self._decoder.embed_tokens.weight
        for linear in self.linears.values():
            linear.pack(keep_weight=linear.weight is tied)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows] -> [rows, hidden], with the scale that some architectures apply."""
        hidden: torch.Tensor = self._decoder.embed_tokens(tokens)
        return hidden

    def layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        *,
        attend: Attend,
        rows: SlotRows | None = None,
        span: range | None = None,
    ) -> torch.Tensor:
        """Run the layers of `span` (all of them by default) over packed rows."""
        states = hidden[None]
        rope = self._rope(states, positions[None])
        with self._rows(rows):
            for index in span if span is not None else range(self.shape.num_layers):
                layer_type = self._layer_types[index] if self._layer_types else ""
                states = self._decoder.layers[index](
                    states,
                    attention_mask=None,
                    position_ids=positions[None],
                    position_embeddings=rope[layer_type],
                    past_key_values=None,
                    attend=attend,
                )
        return states[0]

    def logits(self, hidden: torch.Tensor, *, rows: SlotRows | None = None) -> torch.Tensor:
        """Final norm and head: [rows, hidden] -> float32 [rows, vocabulary]."""
        with self._rows(rows):
            logits: torch.Tensor = self._head(self._norm(hidden[None]))[0].float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _rope(self, states: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        rotary = self._decoder.rotary_emb
        if self._layer_types is None:
            return {"": rotary(states, positions)}
        return {kind: rotary(states, positions, kind) for kind in set(self._layer_types)}

    @contextmanager
    def _rows(self, rows: SlotRows | None) -> Iterator[None]:
        self._active.rows = rows
        try:
            yield
        finally:
            self._active.rows = None


def load_model(
    folder: Path, *, device: str = "cpu", dtype: str = "auto", names: frozenset[str] = frozenset()
) -> SlottedModel:
    """Read a model folder. `auto` is float32 on the CPU and the folder's own type elsewhere.

    `names` are further names the same weights go by, for matching adapters to their base.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json. Give a folder written by "
            "save_pretrained, a Hugging Face id, or `smollm2`."
        )
    kind: Any = dtype
    if dtype == "auto":
        kind = torch.float32 if device == "cpu" else "auto"
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, attn_implementation="eager"
        )
        model = model.to(device).eval().requires_grad_(requires_grad=False)
    _check_parts(model, folder)
    tokens = torch.arange(_PROBE_TOKENS, device=device) % config.get_text_config().vocab_size
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0].float()
    _check_finite(model, expected, folder)
    model.set_attn_implementation(ATTENTION)
    known = {folder.name, getattr(config, "_name_or_path", "") or "", *names}
    slotted = SlottedModel(
        model, names=frozenset(name.rsplit("/", 1)[-1].lower() for name in known if name)
    )
    _check_probe(slotted, tokens, expected, folder)
    return slotted


def first_adapted_layer(names: Iterator[str] | list[str], *, num_layers: int) -> int:
    """The lowest decoder layer that any of the named linear layers belongs to."""
    found = [int(m[1]) for name in names if (m := re.search(r"\blayers\.(\d+)\.", name))]
    return min(found, default=num_layers)


def _shape(model: PreTrainedModel) -> ModelShape:
    config = model.config.get_text_config()
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
        context_tokens=config.max_position_embeddings,
        eos_tokens=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _check_parts(model: PreTrainedModel, folder: Path) -> None:
    decoder = model.get_decoder()
    parts = ("embed_tokens", "layers", "rotary_emb")
    missing = [part for part in parts if not hasattr(decoder, part)]
    if missing or not hasattr(model, "lm_head"):
        raise ModelError(
            f"{folder}: {type(model).__name__} has no {', '.join(missing) or 'lm_head'}; the "
            "embedded engine runs decoder models of the Llama, Qwen, Gemma, Mistral and Phi kind. "
            "Serve this one with vLLM."
        )


def _check_finite(model: PreTrainedModel, logits: torch.Tensor, folder: Path) -> None:
    if torch.isfinite(logits).all():
        return
    broken = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    where = f"{broken[0]} holds NaN or infinity" if broken else "its logits overflow"
    raise ModelError(
        f"The model in {folder} is broken: {where}. Fetch or convert it again"
        + ("." if broken else ", or load it with dtype float32.")
    )


def _check_probe(
    model: SlottedModel, tokens: torch.Tensor, expected: torch.Tensor, folder: Path
) -> None:
    attend = CausalAttend([len(tokens)], device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    with torch.inference_mode():
        hidden = model.layers(model.embed(tokens), positions, attend=attend)
        gap = (model.logits(hidden) - expected).abs().max().item()
    if not gap <= _PROBE_TOLERANCE.get(model.dtype, 1e-3) * max(1.0, expected.abs().max().item()):
        raise ModelError(
            f"{folder}: this architecture's forward pass does more than the embedded engine "
            f"drives (probe logits differ by {gap:.3g}). Serve this model with vLLM."
        )
