"""Merges of many parents: as exact as of few, and no operator is asked for what it cannot make."""

import time

import pytest
import torch
from weights.made import best_of_rank, dense, made

from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.delta import low_rank
from rookery.weights.merge import (
    DareConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    merge,
)

WIDE = {"model.layers.0.a": (24, 40), "model.layers.0.b": (40, 24), "model.layers.1.a": (90, 90)}


def test_a_sum_of_more_ranks_than_a_layer_has_is_the_best_of_its_rank() -> None:
    parents = [made(seed, rank=4, shapes=WIDE) for seed in range(14)]
    weights = [0.1 * index - 0.4 for index in range(14)]
    child = merge(parents, weights=weights, method=LinearConfig(normalise=False), rank=6)
    for layer in WIDE:
        deltas = [dense(parent, shapes=WIDE)[layer] for parent in parents]
        total = sum(
            (weight * delta for weight, delta in zip(weights, deltas, strict=True)),
            torch.zeros_like(deltas[0]),
        )
        assert torch.allclose(
            dense(child, shapes=WIDE)[layer],
            best_of_rank(total, 6),
            atol=1e-3 * float(total.abs().max()),
        )


def test_ties_of_many_parents_is_close_to_the_best_of_its_rank() -> None:
    parents = [made(seed, rank=4, shapes=WIDE) for seed in range(14)]
    weights = [1.0] * 14
    exact = merge(parents, weights=weights, method=TiesConfig(), rank=90)
    child = merge(parents, weights=weights, method=TiesConfig(), rank=6)
    for layer, target in dense(exact, shapes=WIDE).items():
        least = (target - best_of_rank(target, 6)).norm()
        assert (dense(child, shapes=WIDE)[layer] - target).norm() < 1.01 * least


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_of_many_parents_is_close_to_the_best_of_its_rank(sign: float) -> None:
    shapes = {"model.layers.0.a": (150, 200), "model.layers.1.a": (200, 150)}
    parents = [made(seed, rank=8, shapes=shapes) for seed in range(32)]
    # Each parent twice: with sign -1 the rows of a cancel, and the deltas do not.
    twins = [
        make_adapter(
            f"twin{parent.name}",
            base=parent.base,
            factors={
                layer: LoraFactors(a=sign * lora.a, b=sign * lora.b, scale=lora.scale)
                for layer, lora in parent.factors.items()
            },
        )
        for parent in parents
    ]
    child = merge(parents + twins, weights=[1.0] * 64, method=LinearConfig(), rank=6)
    for layer in shapes:
        deltas = [dense(parent, shapes=shapes)[layer] for parent in parents]
        target = torch.stack(deltas).mean(dim=0)
        least = (target - best_of_rank(target, 6)).norm()
        assert (dense(child, shapes=shapes)[layer] - target).norm() < 1.001 * least


def test_the_cost_of_a_merge_does_not_grow_with_the_cube_of_its_parents() -> None:
    def seconds(count: int, *, size: int) -> float:
        shapes = {"model.layers.0.a": (size, size)}
        parents = [made(seed, rank=8, shapes=shapes) for seed in range(count)]
        best = 9.0
        for _ in range(3):
            began = time.process_time()
            merge(parents, weights=[1.0] * count, method=LinearConfig(), rank=8)
            best = min(best, time.process_time() - began)
        return best

    # Four times the parents took 40 times as long, and 18 times.
    assert seconds(256, size=192) < 8 * seconds(64, size=192)
    assert seconds(64, size=1024) < 8 * seconds(16, size=1024)


def mixed(seed: int, ranks: tuple[int, ...]) -> Adapter:
    """A rank of its own in each layer."""
    rng = torch.Generator().manual_seed(seed)
    factors = {
        layer: LoraFactors(
            a=torch.randn(rank, num_in, generator=rng),
            b=torch.randn(num_out, rank, generator=rng),
            scale=1.0,
        )
        for (layer, (num_in, num_out)), rank in zip(WIDE.items(), ranks, strict=True)
    }
    return make_adapter(f"mixed{seed}", base="tiny", factors=factors)


@pytest.mark.parametrize("method", [TiesConfig(density=0.5), DareConfig(density=0.5)])
def test_ranks_that_differ_from_layer_to_layer_lose_nothing(method: MergeConfig) -> None:
    """The smaller ranks are filled with zeros, which span nothing."""
    parents = [mixed(0, (1, 1, 12)), mixed(1, (1, 12, 1))]
    exact = merge(parents, weights=[0.5, 0.5], method=method, rank=90, key=(1,))
    child = merge(parents, weights=[0.5, 0.5], method=method, rank=12, key=(1,))
    for layer, target in dense(exact, shapes=WIDE).items():
        least = (target - best_of_rank(target, 12)).norm()
        assert (dense(child, shapes=WIDE)[layer] - target).norm() < 1.02 * least


def test_low_rank_together_is_low_rank_of_each() -> None:
    rng = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 30, 40, generator=rng)
    start = torch.randn(3, 14, 40, generator=rng)
    start[1, 2:] = 0
    a, b = low_rank(matrices, rank=6, start=start)
    for index, matrix in enumerate(matrices):
        own_a, own_b = low_rank(matrix, rank=6, start=start[index])
        assert torch.allclose(b[index] @ a[index], own_b @ own_a, atol=1e-4)
