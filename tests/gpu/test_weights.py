"""Children made on a GPU: those of the CPU but for rounding, and the same bits every time.

pytest tests/gpu/test_weights.py
"""

import pytest
import torch
from weights.made import dense, made

from rookery.fleet.vllm_plugin.population import LayerNoise, draws, perturbed
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


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_members_of_a_population_have_the_same_bits_on_a_gpu(rank: int) -> None:
    layers = [(name, 8, num_in, num_out) for name, (num_in, num_out) in SHAPES.items()]
    centre = made(1, rank=8, shapes=SHAPES).factors
    noise, seeds, amounts = LayerNoise(layers, rank=rank), [1, 2**62, 77], [0.1, -0.1, 0.3]
    members = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        factors = [(centre[name].a.to(device), centre[name].b.to(device)) for name, *_ in layers]
        [(_, drawn, moved)] = draws(noise, seeds, amounts, device)
        made_there = perturbed(factors, noise, drawn, moved)
        members.append([factor.cpu() for pair in made_there for factor in pair])
    assert all(torch.equal(one, other) for one, other in zip(*members, strict=True))
