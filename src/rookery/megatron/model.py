"""A SlottedModel whose layers are megatron-core's, spread over tensor-parallel ranks.

    model = load_parallel_model(folder, ranks=join_ranks("cpu"))
    hidden = model.layers(model.embed(tokens), positions, attend=..., rows=...)

The trainer and the engine run on it as on any slotted model, in every rank alike. Adapters are held
whole by every rank, which multiplies by its part of them:

    queries, keys, values, gate, up, head:  out_r = W_r x + B_r A x        B_r: rows of B
    o, down:                                out = sum W_r x_r + B A_r x_r  A_r: columns of A

so that the sum of a factor's gradients over the ranks is its gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from rookery.errors import ModelError, boundary
from rookery.megatron.engine import Ranks
from rookery.megatron.gpt import CurrentPass, make_gpt
from rookery.model_names import model_names
from rookery.slots import CausalAttend, SlotRows, SlottedModel
from rookery.slots.attention import Attend
from rookery.slots.linear import SlottedLinear
from rookery.slots.probe import Probe, agree, gap
from rookery.slots.rows import SlotFactors

__all__ = ["ParallelModel", "load_parallel_model"]

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
    probe = Probe(text.vocab_size, text.max_position_embeddings, device=model.device)
    with torch.inference_mode():
        expected = model(probe.tokens, position_ids=probe.positions).logits.flatten(0, 1).float()
    known = model_names(str(folder), str(folder.resolve()), *names)
    with boundary(ModelError, f"{folder}: megatron-core cannot run {type(model).__name__}"):
        parallel = ParallelModel(model, names=known, ranks=ranks)
        _check(parallel, probe, expected)
    return parallel


def _check(model: "ParallelModel", probe: Probe, expected: torch.Tensor) -> None:
    attend = CausalAttend(probe.lengths, device=model.device)
    with torch.inference_mode():
        hidden = model.embed(probe.tokens.flatten())
        hidden = model.layers(hidden, probe.positions.flatten(), attend=attend)
        got = model.logits(hidden)
    if not agree(got, expected, dtype=model.dtype):
        off = gap(got, expected, dtype=model.dtype)
        raise ModelError(f"probe logits differ by {off:.3g} from transformers'.")


class ParallelModel(SlottedModel):
    """This rank's part of the model; every method is called by all ranks at the same time."""

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
        """Add the adapters' part to what megatron-core's linear layers give."""
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
        """Free transformers' copy. Shapes stay, for slots and checks, on memory of one number."""
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
        # megatron-core's logits gather needs a GPU.
        before, width = self._ranks.rank * logits.shape[-1], self._ranks.size * logits.shape[-1]
        padded = functional.pad(logits, (before, width - before - logits.shape[-1]))
        whole: torch.Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(padded)
        return whole[:, 0, : self.shape.vocab_size].float()

    def _column(self, names: tuple[str, ...], *, groups: int = 1) -> Hook:
        """Of a layer whose outputs are spread; those of the named ones lie in turns, by groups."""
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
        """Of a layer whose inputs are spread."""
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
        """B A x of this rank: with its rows of B, or with its columns of A."""
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
