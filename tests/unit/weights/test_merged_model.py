"""Adapters merged into model folders."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import tiny_adapter, write_tiny_model

from rookery.errors import AdapterError
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
