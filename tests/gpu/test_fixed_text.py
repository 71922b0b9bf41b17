"""A recorded reading computes with the weights of now."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model

from rookery.slots import FixedText, load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def test_a_recorded_reading_follows_weights_that_change_in_place(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    models = [load_model(folder, device=device, dtype="float32") for device in ("cuda", "cpu")]
    texts = [FixedText(model, tokens=(1, 5, 2, 7), ids=(3, 1, 4)) for model in models]
    for factor in (1.0, 3.0, 0.5):
        for model in models:
            with torch.no_grad():
                model.weights["model.layers.1.mlp.down_proj.weight"].mul_(factor)
        torch.cuda.synchronize()
        on_gpu, on_cpu = (text.logprobs() for text in texts)
        assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
