"""Seeded noise: replayed from its seed, mirrored by its sign, summed without being stored."""

import pytest
import torch
from weights.made import made

from rookery.errors import AdapterError
from rookery.types import Adapter
from rookery.weights.mutate import accumulate, perturb


def noise(seed: int, like: Adapter) -> dict[str, torch.Tensor]:
    """eps(seed), read off an adapter of zeros."""
    zero = made(0, size=0.0)
    moved = perturb(zero, seed=(seed,), sigma=1.0)
    assert moved.factors.keys() == like.factors.keys()
    return {f"{k}.{x}": getattr(f, x) for k, f in moved.factors.items() for x in "ab"}


def test_noise_is_standard_normal_and_its_own_for_each_tensor_and_seed() -> None:
    shapes = {"p": (200, 200), "q": (200, 200)}
    zero = made(0, rank=50, shapes=shapes, size=0.0)
    one, two = (perturb(zero, seed=(9, seed), sigma=1.0).factors for seed in range(2))
    tensors = [x for f in (one["p"], one["q"], two["p"]) for x in (f.a.flatten(), f.b.T.flatten())]
    rows = torch.stack(tensors)
    assert torch.allclose(rows.std(1), torch.ones(6), atol=0.05)
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 0.05


def test_perturb_replays_and_mirrors() -> None:
    adapter = made(3)
    plus, again = (perturb(adapter, seed=(5, 1), sigma=0.1) for _ in range(2))
    minus = perturb(adapter, seed=(5, 1), sigma=-0.1)
    assert plus.version == again.version != adapter.version
    for layer, f in adapter.factors.items():
        middle = (plus.factors[layer].a + minus.factors[layer].a) / 2
        assert torch.allclose(middle, f.a, atol=1e-6)


def test_accumulate_is_the_weighted_sum_of_the_same_noise() -> None:
    adapter = made(3)
    amounts = [0.5, -0.25, 0.0]
    moved = accumulate(adapter, seeds=[(1,), (2,), (3,)], amounts=amounts)
    draws = [noise(seed, adapter) for seed in (1, 2, 3)]
    for layer, f in adapter.factors.items():
        for x in "ab":
            step = sum(c * d[f"{layer}.{x}"] for c, d in zip(amounts, draws, strict=True))
            assert torch.allclose(getattr(moved.factors[layer], x), getattr(f, x) + step, atol=1e-6)


def test_an_evolution_strategy_climbs_with_seeds_alone() -> None:
    """Mirrored sampling on a quadratic: the adapter comes closer to a target."""
    target, current = made(1), made(2)

    def height(adapter: Adapter) -> float:
        return -sum(
            float(
                (f.a - target.factors[k].a).square().sum()
                + (f.b - target.factors[k].b).square().sum()
            )
            for k, f in adapter.factors.items()
        )

    start = height(current)
    for step in range(30):
        seeds = [(step, member) for member in range(16)]
        gains = [
            height(perturb(current, seed=s, sigma=0.1))
            - height(perturb(current, seed=s, sigma=-0.1))
            for s in seeds
        ]
        largest = max(abs(g) for g in gains)
        current = accumulate(current, seeds=seeds, amounts=[0.1 * g / largest for g in gains])
    assert height(current) > 0.5 * start


def test_one_amount_per_seed() -> None:
    with pytest.raises(AdapterError, match="1 seeds and 2 amounts"):
        accumulate(made(0), seeds=[(1,)], amounts=[1, 2])
