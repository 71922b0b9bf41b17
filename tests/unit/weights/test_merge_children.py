"""What holds for every operator in both spaces: equal and zero parents, odd shapes, keys."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from weights.made import SHAPES, best_of_rank, dense, made

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merge import (
    Cross,
    DareConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    merge,
    merge_stack,
)
from rookery.weights.merge.children import low_rank
from rookery.weights.stack import empty_stack, stack, unstack

TYPES = ["linear", "ties", "dare", "dare_ties", "layerwise"]
EXACT: dict[str, dict[str, object]] = {
    "ties": {"density": 1.0},
    "dare": {"density": 1.0},
    "dare_ties": {"density": 1.0},
}
"""Settings under which an operator keeps everything."""

every = pytest.mark.parametrize("space", ["delta", "factor"])
operator = pytest.mark.parametrize("kind", TYPES)


def method_of(kind: str, space: str, **options: object) -> MergeConfig:
    document = {"type": kind, "space": space} | options
    parsed: MergeConfig = TypeAdapter(MergeConfig).validate_python(document)
    return parsed


@every
@operator
def test_equal_parents_give_the_parent(kind: str, space: str) -> None:
    x = made(0)
    method = method_of(kind, space, **EXACT.get(kind, {}))
    child = merge([x, x], weights=[0.3, 0.7], method=method, rank=3, key=(1,))
    for layer, delta in dense(child).items():
        assert torch.allclose(delta, dense(x)[layer], atol=1e-4)


@every
@operator
def test_zero_parents_give_zero(kind: str, space: str) -> None:
    zero = made(0, size=0.0)
    child = merge([zero, zero], weights=[1, 1], method=method_of(kind, space), key=(1,))
    assert all(not delta.any() for delta in dense(child).values())


@every
@operator
def test_disjoint_layers_and_other_ranks(kind: str, space: str) -> None:
    one, two, three = SHAPES
    x = made(0, rank=2, shapes={one: SHAPES[one], two: SHAPES[two]})
    y = made(1, rank=4, scale=0.5, shapes={three: SHAPES[three]})
    method = method_of(kind, space, **EXACT.get(kind, {}))
    child = merge([x, y], weights=[1, 1], method=method, rank=5, key=(1,))
    assert set(child.factors) == set(SHAPES) and child.rank == 5
    # A layer that only one parent has is that parent's, times its coefficient.
    for layer, delta in dense(child).items():
        owner = dense(x if layer in x.factors else y)[layer]
        ratio = (delta * owner).sum() / owner.square().sum()
        assert torch.allclose(delta, ratio * owner, atol=1e-4)
        if kind == "linear" and space == "delta":
            assert ratio == pytest.approx(0.5, rel=1e-4)


@every
@pytest.mark.parametrize("kind", ["linear", "dare_ties", "layerwise"])
def test_a_child_depends_neither_on_the_others_nor_on_the_number_of_threads(
    kind: str, space: str
) -> None:
    shapes = {"model.layers.0.up": (150, 200), "model.layers.1.up": (150, 200)}
    parents = [made(seed, rank=8, shapes=shapes) for seed in range(3)]
    population, method = stack(parents), method_of(kind, space)
    crosses = [
        Cross(parents=(0, 1), weights=(0.4, 0.6), key=(7, 1, 0)),
        Cross(parents=(2, 1), weights=(0.5, 0.5), key=(7, 1, 1)),
        Cross(parents=(1, 0), weights=(0.2, 0.8), key=(7, 1, 2)),
    ]
    together = merge_stack(population, crosses=crosses, method=method)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(num_threads, 2))
    try:
        again = merge_stack(population, crosses=crosses, method=method)
    finally:
        torch.set_num_threads(num_threads)
    if space == "factor":
        assert torch.equal(together.data, again.data)
    # How QR and SVD share out their sums is the linear algebra library's own choice.
    for mine, theirs in zip(
        unstack(together, names="xyz"), unstack(again, names="xyz"), strict=True
    ):
        for layer, delta in dense(mine).items():
            assert torch.allclose(delta, dense(theirs)[layer], atol=1e-3)
    for row, cross in enumerate(crosses):
        alone = merge_stack(population, crosses=[cross], method=method).data[0]
        assert torch.equal(together.data[row], alone)


@pytest.mark.parametrize("kind", ["dare", "dare_ties", "layerwise"])
@every
def test_another_key_gives_another_child(kind: str, space: str) -> None:
    parents, method = [made(0), made(1)], method_of(kind, space)
    versions = {
        merge(parents, weights=[1, 1], method=method, key=(seed,)).version for seed in range(8)
    }
    assert len(versions) > 1


@every
def test_memory_can_be_used_again(space: str) -> None:
    population, method = stack([made(0), made(1)]), method_of("dare_ties", space)
    crosses = [Cross(parents=(0, 1), weights=(1, 2), key=(3,))]
    out = empty_stack(population.layout, num_rows=1)
    out.data.fill_(7)
    fresh = merge_stack(population, crosses=crosses, method=method)
    used = merge_stack(population, crosses=crosses, method=method, out=out)
    assert used is out
    for layer in SHAPES:
        assert torch.equal(used.a(layer), fresh.a(layer))
        assert torch.equal(used.b(layer), fresh.b(layer))


def test_crosses_may_have_different_numbers_of_parents() -> None:
    population = stack([made(0), made(1), made(2)])
    crosses = [
        Cross(parents=(0, 1, 2), weights=(1, 1, 1)),
        Cross(parents=(1,), weights=(1,)),
        Cross(parents=(2, 0), weights=(1, 1)),
    ]
    children = merge_stack(population, crosses=crosses, method=LinearConfig(), rank=9)
    layer = next(iter(SHAPES))
    products = population.b(layer) @ population.a(layer)
    expected = torch.stack([products.mean(0), products[1], (products[0] + products[2]) / 2])
    assert torch.allclose(children.b(layer) @ children.a(layer), expected, atol=1e-5)


def test_dtype_and_base_are_kept() -> None:
    half = {
        layer: type(f)(a=f.a.bfloat16(), b=f.b.bfloat16(), scale=f.scale)
        for layer, f in made(0).factors.items()
    }
    parent = make_adapter("half", base="tiny", factors=half)
    child = merge([parent, parent], weights=[1, 1], method=LinearConfig())
    assert {f.a.dtype for f in child.factors.values()} == {torch.bfloat16}
    assert child.base == "tiny"


@pytest.mark.parametrize(
    ("weights", "method", "rank", "sentence"),
    [
        ([1, -1], LinearConfig(), None, "sum to 0"),
        ([1], LinearConfig(), None, "2 parents and 1 weights"),
        ([1, -2], TiesConfig(), None, "needs weights of at least 0"),
        ([0.5, float("nan")], LinearConfig(), None, r"weights \[0.5, nan\]; give finite numbers"),
        ([0.5, "0.5"], LinearConfig(), None, "give finite numbers"),
        ([0.5, 0.5], LinearConfig(), 0, "rank is 0; give 1 or more"),
    ],
)
def test_what_means_nothing_is_refused(
    weights: list[float], method: MergeConfig, rank: int | None, sentence: str
) -> None:
    with pytest.raises(AdapterError, match=sentence):
        merge([made(0), made(1)], weights=weights, method=method, rank=rank)
    with pytest.raises(AdapterError, match="rows 0 to 1"):
        crosses = [Cross(parents=(0, 2), weights=(1, 1))]
        merge_stack(stack([made(0), made(1)]), crosses=crosses, method=LinearConfig())


def test_configs_refuse_what_they_do_not_know() -> None:
    for document in ({"density": 0.0}, {"density": 1.5}, {"space": "middle"}, {"dense": 1}):
        with pytest.raises(ValidationError):
            TiesConfig.model_validate(document)


def test_numbers_of_numpy_are_numbers() -> None:
    parents, weights = [made(1), made(2)], [0.25, 0.75]
    plain = merge(parents, weights=weights, method=TiesConfig(), key=(1,))
    given: list[Any] = [np.float32(weight) for weight in weights]
    assert merge(parents, weights=given, method=TiesConfig(), key=(1,)).version == plain.version


# Merges of many parents.


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

    # Four times the parents took 40 times as long.
    assert seconds(256, size=192) < 8 * seconds(64, size=192)


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
