"""What is read after a text follows the weights as they change in place."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.slots import FixedText, load_model

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
