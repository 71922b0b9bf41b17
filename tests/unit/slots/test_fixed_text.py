"""What is read after a text follows the weights as they change in place."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.slots import FixedText, SlottedModel, load_model
from rookery.types import LoraFactors

TOKENS, IDS = (1, 5, 2, 7), (3, 1, 4)


def test_readings_are_those_of_transformers_before_and_after_a_change(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_model(folder)
    text = FixedText(model, tokens=TOKENS, ids=IDS)
    name = "model.layers.1.mlp.down_proj.weight"
    found = []
    for factor in (1.0, 3.0):
        with torch.no_grad():
            model.weights[name].mul_(factor)
            reference.get_parameter(name).mul_(factor)
            row = torch.log_softmax(reference(torch.tensor([TOKENS])).logits[0, -1], dim=-1)
        found.append(text.logprobs())
        assert found[-1] == pytest.approx(row[list(IDS)].tolist(), abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_an_adapter_reads_as_its_product_added_to_the_weights(tmp_path: Path) -> None:
    """Also one of other layers and another rank, also the output layer, also none again."""
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    model = load_model(folder)
    text = FixedText(model, tokens=TOKENS, ids=IDS)
    first = make_factors(model, ["model.layers.0.self_attn.q_proj"], rank=2, seed=0)
    others = ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj", "lm_head"]
    found = []
    for factors in (first, make_factors(model, others, rank=3, seed=1), {}, first):
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach().clone())
        with torch.no_grad():
            for layer, lora in factors.items():
                reference.get_parameter(f"{layer}.weight").add_(lora.scale * lora.b @ lora.a)
            row = torch.log_softmax(reference(torch.tensor([TOKENS])).logits[0, -1], dim=-1)
        found.append(text.logprobs(factors))
        assert found[-1] == pytest.approx(row[list(IDS)].tolist(), abs=1e-5)
    assert found[0] == found[3] and found[0] != pytest.approx(found[2], abs=1e-3)


def make_factors(
    model: SlottedModel, layers: list[str], *, rank: int, seed: int
) -> dict[str, LoraFactors]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        layer: LoraFactors(
            a=random(rank, model.linears[layer].in_features),
            b=random(model.linears[layer].out_features, rank),
            scale=0.7,
        )
        for layer in layers
    }
