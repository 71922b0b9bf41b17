"""A model over weights in a server's layout: the same model, in the same memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.errors import FleetError
from rookery.fleet.bridges.alias import alias_weights
from rookery.fleet.vllm_plugin.shared_memory import SharedFile, lay_out, view
from rookery.slots import CausalAttend, SlottedModel, load_model
from rookery.slots.loading import attach_model, weight_shapes

QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
LLAMA = {**QKV, "gate_up_proj": ["gate_proj", "up_proj"]}
FAMILIES = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "Mistral": LLAMA,
    "Gemma": LLAMA,
    "Gemma2": LLAMA,
    "Starcoder2": QKV,
    "Phi3": {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]},
    "Phi": QKV,
}
EXTRA: dict[str, dict[str, Any]] = {
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
}
"""The families of models that can be aliased, with what vLLM fuses of them."""


def served_weights(folder: Path, packed: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """As vLLM lays them out: fused, the vocabulary padded, tied weights under both names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    served: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        fused = next((f for f, parts in packed.items() if leaf in parts and f != leaf), None)
        if fused is None:
            served[name] = tensor
        elif leaf == packed[fused][0]:
            parts = [plain[f"{parent}.{part}.{kind}"] for part in packed[fused]]
            served[f"{parent}.{fused}.{kind}"] = torch.cat(parts)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in served:
            served[name] = torch.cat([served[name], torch.zeros(31, served[name].shape[1])])
    served.setdefault("lm_head.weight", served["model.embed_tokens.weight"])
    return served


def logits(model: SlottedModel) -> torch.Tensor:
    tokens = torch.arange(4, 24)
    with torch.no_grad():
        hidden = model.layers(
            model.embed(tokens), torch.arange(20), attend=CausalAttend([20], device=model.device)
        )
        return model.logits(hidden)


@pytest.mark.parametrize(
    "kind", ["Llama", "Gemma2", "Phi3", *(pytest.param(k, marks=long) for k in FAMILIES)]
)
def test_a_model_over_a_servers_weights_is_the_model_of_the_folder(
    kind: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / kind, kind, **EXTRA.get(kind, {}))
    served = served_weights(folder, FAMILIES[kind])
    attached = attach_model(folder, lambda shapes: alias_weights(served, FAMILIES[kind], shapes))
    loaded = load_model(folder)
    assert torch.equal(logits(attached), logits(loaded))
    assert attached.weights.keys() == loaded.weights.keys()
    inside = {
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in served.values()
    }
    for name, weight in attached.weights.items():
        begin = weight.data_ptr()
        assert any(start <= begin < start + size for start, size in inside), f"{name} is a copy"
    for tensor in served.values():
        tensor.mul_(0.5)
    assert not torch.equal(logits(attached), logits(loaded)), "it sees what the server's become"


def test_a_model_over_a_servers_weights_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "large", hidden_size=128, intermediate_size=512)
    served = served_weights(folder, LLAMA)
    manifest = lay_out(served)
    file = SharedFile(num_bytes=manifest["bytes"])
    shared = {name: view(file.memory, entry) for name, entry in manifest["tensors"].items()}
    for name, tensor in shared.items():
        tensor.copy_(served.pop(name))
    before = tensor_memory()
    model = attach_model(folder, lambda shapes: alias_weights(shared, LLAMA, shapes))
    added = {begin: size for begin, size in tensor_memory().items() if begin not in before}
    assert sum(added.values()) < 0.05 * manifest["bytes"], "of the model"
    assert sum(weight.nbytes for weight in model.weights.values()) > 0.9 * manifest["bytes"]


def tensor_memory() -> dict[int, int]:
    """The bytes of all memory that tensors of this process are in, by its address."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # others of this process may be without data
    tensors = [found for found in gc.get_objects() if type(found) in kinds]
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.layout == torch.strided  # packed ones hide theirs
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_tied_weights_are_asked_for_once(tmp_path: Path) -> None:
    """vLLM's Gemma 2 has no output layer by name: it computes with its embeddings."""
    tied = write_tiny_model(tmp_path / "tied", "Gemma2", head_dim=8)
    assert weight_shapes(tied).keys() == load_model(tied).weights.keys()
    assert "lm_head.weight" not in weight_shapes(tied)
    apart = write_tiny_model(tmp_path / "apart", "Gemma2", head_dim=8, tie_word_embeddings=False)
    assert "lm_head.weight" in weight_shapes(apart)


def test_a_weight_without_a_view_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    served = served_weights(folder, LLAMA)
    shapes = {n: tuple(p.shape) for n, p in load_model(folder).weights.items()}
    missing = {n: t for n, t in served.items() if n != "model.layers.1.self_attn.qkv_proj.weight"}
    with pytest.raises(FleetError, match=r"no weight that is model\.layers\.1\.self_attn\.q_proj"):
        alias_weights(missing, LLAMA, shapes)
    more = served | {"model.layers.0.self_attn.W_UK": torch.ones(3)}
    with pytest.raises(FleetError, match=r"W_UK \(3,\) is none of the model's folder"):
        alias_weights(more, LLAMA, shapes)
    narrow = served | {"model.norm.weight": torch.ones(7)}
    with pytest.raises(FleetError, match=r"model\.norm\.weight is \(32,\) .* and \(7,\)"):
        alias_weights(narrow, LLAMA, shapes)
    short = served | {"model.layers.0.mlp.gate_up_proj.weight": torch.ones(100, 32)}
    with pytest.raises(FleetError, match=r"gate_up_proj\.weight has 100 rows, and .* have 128"):
        alias_weights(short, LLAMA, shapes)
