"""A SlottedModel whose layers are megatron-core's, spread over tensor-parallel ranks.

    model = load_parallel_model(folder, ranks=join_ranks("cpu"))
    hidden = model.layers(model.embed(tokens), positions, attend=..., rows=...)

The trainer and the engine run on it as on any slotted model, in every rank. Every rank holds whole
adapters, and multiplies by its part of them:

    queries, keys, values, gate, up, head:  out_r = W_r x + B_r A x        B_r: rows of B
    o, down:                                out = sum W_r x_r + B A_r x_r  A_r: columns of A

So a factor's gradient is the sum of its gradients over the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from rookery.errors import ModelError, boundary
from rookery.megatron.engine import Ranks
from rookery.model_names import model_names
from rookery.slots import CausalAttend, SlotRows, SlottedModel
from rookery.slots.attention import Attend, Heads, PositionProbe, agree, gap
from rookery.slots.linear import SlottedLinear
from rookery.slots.rows import SlotFactors

__all__ = ["load_parallel_model"]


# A Hugging Face decoder as megatron-core's GPTModel, of which every rank holds its part.
#
#     gpt = make_gpt(model.config, weights, ranks=ranks, current=CurrentPass())
#
# Attention and positions are Rookery's own: megatron-core's need a GPU, and here sequences lie end
# to end in one batch.


Tensors = Mapping[str, torch.Tensor]


class CurrentPass:
    """State of a pass for attention: megatron-core's layers pass no extra arguments on."""

    attend: Attend
    cos: torch.Tensor
    """[rows, head]"""
    sin: torch.Tensor


class PackedAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention over packed rows [rows, 1, hidden]."""

    def __init__(self, *args: Any, current: CurrentPass, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._current = current
        size = self.hidden_size_per_attention_head
        self._heads = Heads(
            layer=self.layer_number - 1, scale=size**-0.5, softcap=None, window=None
        )

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        query, key, value = (x[:, 0] for x in self.get_query_key_value_tensors(hidden_states))
        kv = torch.stack((self._rotated(key), value), dim=1)
        mixed = self._current.attend(self._rotated(query), kv, self._heads)
        return self.linear_proj(mixed.reshape(len(mixed), 1, -1))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [rows, heads, head], each head by the angles of its row's position."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self._current.cos[:, None] + turned * self._current.sin[:, None]


def make_gpt(config: Any, weights: Tensors, *, ranks: Ranks, current: CurrentPass) -> Any:
    """Build the model from the config and the weights of transformers, under its names."""
    _check_divisible(config, ranks)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks.size)
    rank_weights = _RankWeights(config, weights, ranks)
    any_weight = next(iter(weights.values()))
    spec = get_gpt_layer_local_spec(qk_layernorm=rank_weights.has_qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention
    attention.module = PackedAttention
    attention.params = {"attn_mask_type": AttnMaskType.causal, "current": current}
    attention.submodules.core_attention = IdentityOp
    gpt = GPTModel(
        config=_transformer_config(config, rank_weights, ranks, any_weight),
        transformer_layer_spec=spec,
        vocab_size=rank_weights.padded_vocab,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights="lm_head.weight" not in weights,
    )
    result = gpt.load_state_dict(rank_weights.state(), strict=False)
    missing = [name for name in result.missing_keys if "_extra_state" not in name]
    wrong = [*missing, *result.unexpected_keys, *rank_weights.unused]
    if wrong:
        raise ModelError(
            f"megatron-core's layers and the weights of this {config.model_type} model do not "
            f"match: {wrong[0]}. The server runs models of the Llama and Qwen kind."
        )
    return gpt.to(any_weight.device).eval().requires_grad_(requires_grad=False)


def _check_divisible(config: Any, ranks: Ranks) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks.size:
            raise ModelError(
                f"{name} of this model is {getattr(config, name)}, which {ranks.size} ranks cannot "
                "share: give torchrun an --nproc-per-node that divides it, such as 1."
            )


def _transformer_config(
    config: Any, rank_weights: "_RankWeights", ranks: Ranks, like: torch.Tensor
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=rank_weights.head_dim,
        ffn_hidden_size=config.intermediate_size,
        tensor_model_parallel_size=ranks.size,
        params_dtype=like.dtype,
        bf16=like.dtype == torch.bfloat16,
        fp16=like.dtype == torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        add_bias_linear=False,
        add_qkv_bias=rank_weights.has_qkv_bias,
        qk_layernorm=rank_weights.has_qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


class _RankWeights:
    """The weights of one rank under megatron-core's names.

    There, queries, keys and values are one layer, group by group: with 4 query and 2 key heads q0
    q1 k0 v0 q2 q3 k1 v1. Gate and up are one layer on each rank, too.
    """

    def __init__(self, config: Any, weights: Tensors, ranks: Ranks) -> None:
        self._config = config
        self._weights = weights
        self._ranks = ranks
        self._used: set[str] = set()
        heads = config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.padded_vocab = -(-config.vocab_size // ranks.size) * ranks.size
        self.has_qkv_bias = "model.layers.0.self_attn.q_proj.bias" in weights
        self.has_qk_norm = "model.layers.0.self_attn.q_norm.weight" in weights

    @property
    def unused(self) -> list[str]:
        return sorted(self._weights.keys() - self._used)

    def state(self) -> dict[str, torch.Tensor]:
        state = {
            "embedding.word_embeddings.weight": self._vocabulary("model.embed_tokens.weight"),
            "decoder.final_layernorm.weight": self._take("model.norm.weight"),
        }
        if "lm_head.weight" in self._weights:
            state["output_layer.weight"] = self._vocabulary("lm_head.weight")
        for layer in range(self._config.num_hidden_layers):
            theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            state |= {theirs + name: tensor for name, tensor in self._layer(ours).items()}
        return state

    def _layer(self, prefix: str) -> dict[str, torch.Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        gate_up = [self._rows(f"{mlp}{name}_proj.weight") for name in ("gate", "up")]
        layer = {
            "input_layernorm.weight": self._take(f"{prefix}input_layernorm.weight"),
            "pre_mlp_layernorm.weight": self._take(f"{prefix}post_attention_layernorm.weight"),
            "self_attention.linear_qkv.weight": self._qkv(attention, "weight"),
            "self_attention.linear_proj.weight": self._columns(f"{attention}o_proj.weight"),
            "mlp.linear_fc1.weight": torch.cat(gate_up),
            "mlp.linear_fc2.weight": self._columns(f"{mlp}down_proj.weight"),
        }
        if self.has_qkv_bias:
            layer["self_attention.linear_qkv.bias"] = self._qkv(attention, "bias")
        if self.has_qk_norm:
            for name in "qk":
                norm = self._take(f"{attention}{name}_norm.weight")
                layer[f"self_attention.{name}_layernorm.weight"] = norm
        return layer

    def _qkv(self, prefix: str, kind: str) -> torch.Tensor:
        groups = self._config.num_key_value_heads // self._ranks.size
        parts = [self._rows(f"{prefix}{name}_proj.{kind}") for name in "qkv"]
        grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def _take(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ModelError(
                f"This model has no {name}: the server runs models of the Llama and Qwen kind."
            )
        self._used.add(name)
        return self._weights[name].detach()

    def _rows(self, name: str) -> torch.Tensor:
        return self._take(name).chunk(self._ranks.size)[self._ranks.rank]

    def _columns(self, name: str) -> torch.Tensor:
        return self._take(name).chunk(self._ranks.size, dim=1)[self._ranks.rank]

    def _vocabulary(self, name: str) -> torch.Tensor:
        """Return this rank's rows, after padding with zeros to an equal number per rank."""
        whole = self._take(name)
        padded = functional.pad(whole, (0, 0, 0, self.padded_vocab - len(whole)))
        return padded.chunk(self._ranks.size)[self._ranks.rank]


Hook = Callable[[nn.Module, Any, Any], Any]


def load_parallel_model(
    folder: Path, *, ranks: Ranks, device: str = "cpu", names: frozenset[str] = frozenset()
) -> "ParallelModel":
    """Read a model folder; ModelError unless it computes what transformers computes. Each rank
    reads the whole folder and keeps its part."""
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        kind: Any = torch.float32 if device == "cpu" else "auto"
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, attn_implementation="eager"
        )
        model = model.to(device).eval().requires_grad_(requires_grad=False)
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise ModelError(f"{folder}: layers of the type {', '.join(sorted(kinds))} cannot be run.")
    probe = PositionProbe(text.vocab_size, text.max_position_embeddings, device=model.device)
    with torch.inference_mode():
        expected = model(probe.tokens, position_ids=probe.positions).logits.flatten(0, 1).float()
    known = model_names(str(folder), str(folder.resolve()), *names)
    with boundary(ModelError, f"{folder}: megatron-core cannot run {type(model).__name__}"):
        parallel = ParallelModel(model, names=known, ranks=ranks)
        _check(parallel, probe, expected)
    return parallel


def _check(model: "ParallelModel", probe: PositionProbe, expected: torch.Tensor) -> None:
    attend = CausalAttend(probe.lengths, device=model.device)
    with torch.inference_mode():
        hidden = model.embed(probe.tokens.flatten())
        hidden = model.layers(hidden, probe.positions.flatten(), attend=attend)
        got = model.logits(hidden)
    if not agree(got, expected, dtype=model.dtype):
        off = gap(got, expected, dtype=model.dtype)
        raise ModelError(f"probe logits differ by {off:.3g} from transformers'.")


class ParallelModel(SlottedModel):
    """This rank's part of the model. All ranks call every method at the same time."""

    def __init__(self, model: PreTrainedModel, *, names: frozenset[str], ranks: Ranks) -> None:
        super().__init__(model, names=names)
        self._ranks = ranks
        self._current = CurrentPass()
        config = model.config.get_text_config()
        self._gpt = make_gpt(config, self.weights, ranks=ranks, current=self._current)
        self._groups = config.num_key_value_heads // ranks.size
        self.shape = replace(self.shape, num_kv_heads=self._groups)
        for index, layer in enumerate(self._gpt.decoder.layers):
            self._adapt(f"model.layers.{index}.", layer)
        self._gpt.output_layer.register_forward_hook(self._column(("lm_head",)))
        self._drop_weights(model)

    def _adapt(self, prefix: str, layer: Any) -> None:
        """Add the adapters' outputs to those of megatron-core's linear layers."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = tuple(f"{attention}{name}_proj" for name in "qkv")
        hooks = {
            layer.self_attention.linear_qkv: self._column(qkv, groups=self._groups),
            layer.self_attention.linear_proj: self._row(f"{attention}o_proj"),
            layer.mlp.linear_fc1: self._column((f"{mlp}gate_proj", f"{mlp}up_proj")),
            layer.mlp.linear_fc2: self._row(f"{mlp}down_proj"),
        }
        for module, hook in hooks.items():
            module.register_forward_hook(hook)

    def _drop_weights(self, model: Any) -> None:
        """Free transformers' copy. Shapes stay for slots and checks, on memory of one number."""
        decoder = model.get_decoder()
        decoder.layers, decoder.embed_tokens = nn.ModuleList(), None
        for linear in self.linears.values():
            one = torch.zeros(1, dtype=self.dtype, device=self.device)
            whole = one.expand(linear.out_features, linear.in_features)
            linear.weight = nn.Parameter(whole, requires_grad=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._gpt.embedding.word_embeddings(tokens)
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
        rope = self._positions(hidden[None], positions[None])
        states = hidden[:, None]
        self._current.attend = attend
        with self._rows(rows):
            for index in span if span is not None else range(self.shape.num_layers):
                cos, sin = rope[self._positions.kind(index)]
                self._current.cos, self._current.sin = cos[0], sin[0]
                states, _ = self._gpt.decoder.layers[index](states, attention_mask=None)
        return states[:, 0]

    def logits(
        self, hidden: torch.Tensor, *, rows: SlotRows | Sequence[SlotRows] | None = None
    ) -> torch.Tensor:
        gpt = self._gpt
        tied = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if tied else None
        with self._rows(rows):
            logits, _ = gpt.output_layer(
                gpt.decoder.final_layernorm(hidden[:, None]), weight=weight
            )
        # megatron-core's own gather of logits needs a GPU.
        before, width = self._ranks.rank * logits.shape[-1], self._ranks.size * logits.shape[-1]
        padded = functional.pad(logits, (before, width - before - logits.shape[-1]))
        whole: torch.Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(padded)
        return whole[:, 0, : self.shape.vocab_size].float()

    def _column(self, names: tuple[str, ...], *, groups: int = 1) -> Hook:
        """Return a hook for a layer with spread outputs; named ones interleave by groups."""
        linears = [self.linears[name] for name in names]

        def add(module: Any, args: Any, output: Any) -> Any:
            del module
            if not self._is_adapted(linears):
                return output
            x = tensor_parallel.copy_to_tensor_model_parallel_region(args[0])
            parts = [self._product(x, linear, of_rows=True) for linear in linears]
            grouped = [part.view(len(part), groups, -1) for part in parts]
            delta = torch.cat(grouped, dim=2).flatten(1)[:, None]
            return output[0] + delta, output[1]

        return add

    def _row(self, name: str) -> Hook:
        """Return a hook for a layer whose inputs are spread over ranks."""
        linear = self.linears[name]

        def add(module: Any, args: Any, output: Any) -> Any:
            del module
            if not self._is_adapted([linear]):
                return output
            product = self._product(args[0], linear, of_rows=False)
            delta = tensor_parallel.reduce_from_tensor_model_parallel_region(product[:, None])
            return output[0] + delta, output[1]

        return add

    def _is_adapted(self, linears: Sequence[SlottedLinear]) -> bool:
        rows = self._active.rows
        return any(linear.banks(row) is not None for row in rows for linear in linears)

    def _product(self, x: torch.Tensor, linear: SlottedLinear, *, of_rows: bool) -> torch.Tensor:
        """Return this rank's B A x: with its rows of B, or with its columns of A."""
        flat = x.flatten(0, 1)
        width = -(-linear.out_features // self._ranks.size) if of_rows else linear.out_features
        out = flat.new_zeros(len(flat), width)
        for rows in self._active.rows:
            if (banks := linear.banks(rows)) is not None:
                part = self._rows_part if of_rows else self._columns_part
                rows.add(out, rows.take(flat), [part(*bank, width) for bank in banks])
        return out

    def _rows_part(self, a: torch.Tensor, b: torch.Tensor, width: int) -> SlotFactors:
        part = b[:, self._ranks.rank * width : (self._ranks.rank + 1) * width]
        return a, functional.pad(part, (0, 0, 0, width - part.shape[1]))

    def _columns_part(self, a: torch.Tensor, b: torch.Tensor, _: int) -> SlotFactors:
        return a.chunk(self._ranks.size, dim=2)[self._ranks.rank], b
