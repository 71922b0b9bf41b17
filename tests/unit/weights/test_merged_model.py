"""Adapters merged into model folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import tiny_adapter, write_tiny_model

from rookery.errors import AdapterError
from rookery.types import LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merged_model import write_merged


def test_every_file_of_a_model_is_merged(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    split = tmp_path / "split"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(
        split, max_shard_size="40KB"
    )
    adapter = tiny_adapter("poet")
    write_merged(split, adapter, tmp_path / "merged")
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        before, after = load_file(split / file), load_file(tmp_path / "merged" / file)
        assert before.keys() == after.keys()
        for name, weight in before.items():
            own = adapter.factors.get(name.removesuffix(".weight"))
            delta = 0.0 if own is None else own.scale * (own.b @ own.a)
            assert torch.allclose(after[name], weight + delta, atol=1e-6), name


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    adapter = tiny_adapter("poet", layers=range(5))
    with pytest.raises(AdapterError, match=r"adapts model\.layers\.4"):
        write_merged(folder, adapter, tmp_path / "merged")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({}))
    with pytest.raises(AdapterError, match=r"no \.safetensors"):
        write_merged(tmp_path / "empty", adapter, tmp_path / "other")


def _move_output_layer(folder: Path) -> None:
    """Into a file behind that of the embeddings, as large models have it."""
    weights = load_file(folder / "model.safetensors")
    parts = {"model-1.safetensors": weights, "model-2.safetensors": {}}
    for name in [name for name in weights if name.startswith(("lm_head", "model.norm"))]:
        parts["model-2.safetensors"][name] = weights.pop(name)
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = {name: file for file, tensors in parts.items() for name in tensors}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
def test_an_output_layer_in_any_file_is_merged(tmp_path: Path, is_tied: bool) -> None:
    """Whether it has weights of its own, which are in another file than the embeddings, or those of
    the embeddings: the merged model answers as the model with the adapter does."""
    folder = write_tiny_model(tmp_path / "tiny", tie_word_embeddings=is_tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    split = shutil.copytree(folder, tmp_path / "split")
    _move_output_layer(split)
    own = LoraFactors(a=torch.randn(2, 32), b=torch.randn(97, 2), scale=0.5)
    adapter = make_adapter("poet", base="tiny", factors={"lm_head": own})
    write_merged(split, adapter, tmp_path / "merged")
    tokens = torch.arange(4, 40)[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        expected = model(tokens).logits + own.scale * hidden @ own.a.T @ own.b.T
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(tokens).logits, expected, atol=1e-4)
