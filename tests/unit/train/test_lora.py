"""Which layers an adapter gets, and what it starts from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rookery.config import parse_config
from rookery.errors import ConfigError, TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, initial_adapter
from rookery.train.lora_trainee import target_layers


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


def test_targets_are_ends_of_names_and_layers_the_last_ones(model: SlottedModel) -> None:
    config = LoraConfig(targets=("q_proj", "mlp.up_proj"), layers=2)
    assert target_layers(model, config) == [
        "model.layers.2.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
        "model.layers.3.mlp.up_proj",
        "model.layers.3.self_attn.q_proj",
    ]
    assert len(target_layers(model, LoraConfig())) == 16
    assert target_layers(model, LoraConfig(targets=("lm_head",), layers=1)) == ["lm_head"]


def test_a_new_adapter_is_the_zero_of_peft(model: SlottedModel) -> None:
    config = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
    one = initial_adapter(model, config, name="one", base="tiny", seed=1)
    for name, lora in one.factors.items():
        linear = model.linears[name]
        assert lora.a.shape == (4, linear.in_features)
        assert not lora.b.any() and lora.b.shape == (linear.out_features, 4)
        assert lora.scale == 1.5
        bound = linear.in_features**-0.5
        assert lora.a.abs().max() <= bound
        assert lora.a.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    again = initial_adapter(model, config, name="again", base="tiny", seed=1)
    other = initial_adapter(model, config, name="other", base="tiny", seed=2)
    assert one.version == again.version != other.version
    a, b = (one.factors[f"model.layers.{i}.self_attn.q_proj"].a for i in (0, 1))
    assert not torch.equal(a, b)


def test_targets_that_are_not_there_are_named(model: SlottedModel) -> None:
    with pytest.raises(TrainError, match=r"'q_prj'.*Did you mean q_proj\? There are: down_proj"):
        target_layers(model, LoraConfig(targets=("q_prj",)))
    with pytest.raises(TrainError, match=r"layers is 5; this model has 4: write 1 to 4, or all"):
        target_layers(model, LoraConfig(layers=5))
    documents: list[dict[str, Any]] = [
        {"layers": 0}, {"layers": "some"}, {"targets": []}, {"rank": 0},
    ]  # fmt: skip
    for document in documents:
        with pytest.raises(ConfigError, match=next(iter(document))):
            parse_config(LoraConfig, document, origin="test")
