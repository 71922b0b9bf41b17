"""Children made on a GPU: those of the CPU but for rounding, and the same bits every time.

pytest tests/gpu/test_weights.py
"""

import pytest
import torch
from weights.made import dense, made

from rookery.weights.merge import (
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    merge,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
SHAPES = {"model.layers.0.mlp.up_proj": (256, 512), "model.layers.0.self_attn.q_proj": (256, 256)}


@pytest.mark.parametrize("space", ["delta", "factor"])
@pytest.mark.parametrize(
    "method",
    [
        LinearConfig(),
        LayerwiseConfig(),
        TiesConfig(),
        DareConfig(),
        DareTiesConfig(),
    ],
    ids=lambda method: method.type,
)
def test_a_child_of_the_gpu_is_that_of_the_cpu(method: MergeConfig, space: str) -> None:
    parents = [made(seed, rank=8, shapes=SHAPES) for seed in (1, 2)]
    wanted = method.model_copy(update={"space": space})

    def child(device: str) -> dict[str, torch.Tensor]:
        one = merge(parents, weights=(0.4, 0.6), method=wanted, rank=8, key=(3,), device=device)
        assert all(lora.a.device.type == "cpu" for lora in one.factors.values())
        versions.append(one.version)
        return dense(one, shapes=SHAPES)

    versions: list[str] = []
    ours, theirs, _ = child("cpu"), child("cuda"), child("cuda")
    assert versions[1] == versions[2]
    for layer, delta in ours.items():
        assert torch.dist(delta, theirs[layer]) < 2e-3 * delta.norm()
