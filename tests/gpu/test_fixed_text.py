"""A recorded reading computes with the weights of now."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model

from rookery.slots import FixedText, load_model
from rookery.types import LoraFactors

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


def test_a_recorded_reading_follows_an_adapter(tmp_path: Path) -> None:
    """Also one of another rank, for which it is recorded anew."""
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    models = [load_model(folder, device=device, dtype="float32") for device in ("cuda", "cpu")]
    texts = [FixedText(model, tokens=(1, 5, 2, 7), ids=(3, 1, 4)) for model in models]
    linear = models[1].linears["model.layers.0.self_attn.q_proj"]
    found = []
    for seed, rank in ((0, 2), (1, 2), (2, 3), (0, 2)):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(rank, linear.in_features, generator=generator)
        b = torch.randn(linear.out_features, rank, generator=generator)
        on_gpu, on_cpu = (
            text.logprobs({linear.name: LoraFactors(a=a.to(where), b=b.to(where), scale=0.7)})
            for text, where in zip(texts, ("cuda", "cpu"), strict=True)
        )
        assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
        found.append(on_cpu)
    assert found[0] != pytest.approx(found[1], abs=1e-3)
