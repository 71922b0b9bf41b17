"""Merging delta W: every operator against its dense closed form, and against peft's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from tiny import SIZES
from transformers import LlamaConfig, LlamaForCausalLM
from weights.made import SHAPES, best_of_rank, dense, made

from rookery.types import Adapter
from rookery.weights import make_adapter, write_adapter
from rookery.weights.delta import low_rank
from rookery.weights.merge import (
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    change_rank,
    merge,
)
from rookery.weights.stack import stack

Dense = dict[str, torch.Tensor]


def assert_deltas(child: Adapter, expected: Dense, *, relative: float = 1e-5) -> None:
    for layer, delta in dense(child).items():
        limit = relative * max(1.0, float(expected[layer].abs().max()))
        assert float((delta - expected[layer]).abs().max()) <= limit, layer


def per_layer(parents: list[Adapter], function: Callable[..., torch.Tensor]) -> Dense:
    deltas = [dense(parent) for parent in parents]
    return {layer: function(*(delta[layer] for delta in deltas)) for layer in SHAPES}


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    weights=st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    scales=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
def test_linear_is_the_weighted_sum(
    ranks: list[int], weights: list[float], scales: list[float]
) -> None:
    parents = [made(i, rank=rank, scale=scales[i]) for i, rank in enumerate(ranks)]
    weights = weights[: len(parents)]
    method = LinearConfig(normalise=False)
    child = merge(parents, weights=weights, method=method, rank=sum(ranks))
    terms = per_layer(
        parents, lambda *deltas: sum(w * d for w, d in zip(weights, deltas, strict=True))
    )
    assert_deltas(child, terms)


def test_a_cut_child_is_the_best_of_its_rank() -> None:
    parents = [made(0), made(1), made(2, rank=5)]
    child = merge(parents, weights=[1, 2, 5], method=LinearConfig(), rank=4)
    assert child.rank == 4
    assert_deltas(
        child, per_layer(parents, lambda x, y, z: best_of_rank((x + 2 * y + 5 * z) / 8, 4))
    )
    lora = child.factors["model.layers.0.mlp.up_proj"]
    assert torch.allclose(lora.a.norm(dim=1), lora.b.norm(dim=0), rtol=1e-4)


def test_uniform_average_and_plain_sum() -> None:
    parents = [made(0), made(1)]
    mean = merge(parents, weights=[1, 1], method=LinearConfig(), rank=6)
    total = merge(parents, weights=[1, 1], method=LinearConfig(normalise=False), rank=6)
    assert_deltas(mean, per_layer(parents, lambda x, y: (x + y) / 2))
    assert_deltas(total, per_layer(parents, lambda x, y: x + y))


@pytest.mark.parametrize("unit", ["block", "layer"])
def test_layerwise_picks_one_parent_for_each_unit(unit: str) -> None:
    parents = [made(0), made(1)]
    deltas, seen = [dense(parent) for parent in parents], set()
    for seed in range(40):
        method = LayerwiseConfig.model_validate({"unit": unit})
        child = dense(merge(parents, weights=[1, 1], method=method, rank=3, key=(seed,)))
        chosen = tuple(
            [torch.allclose(child[layer], d[layer], atol=1e-4) for d in deltas].index(True)
            for layer in SHAPES
        )
        assert unit == "layer" or chosen[0] == chosen[1]
        seen.add(chosen)
    assert len(seen) == (4 if unit == "block" else 8)


def test_layerwise_mix_draws_a_mixture_for_each_unit() -> None:
    x = made(0)
    method = LayerwiseConfig(mode="mix")
    child = merge([x, made(1)], weights=[1, 1], method=method, rank=6, key=(1,))
    other = merge([x, made(1)], weights=[1, 1], method=method, rank=6, key=(2,))
    assert child.version != other.version
    assert_deltas(merge([x, x], weights=[1, 1], method=method, rank=6, key=(1,)), dense(x))


def ties_of(density: float) -> Callable[..., torch.Tensor]:
    """Trim, elect, disjoint mean, written plainly on dense matrices with equal weights."""

    def merged(*deltas: torch.Tensor) -> torch.Tensor:
        trimmed = []
        for delta in deltas:
            k = int(density * delta.numel())
            least = delta.abs().flatten().sort(descending=True).values[k - 1]
            trimmed.append(torch.where(delta.abs() >= least, delta, 0))
        votes = torch.stack(trimmed)
        agrees = votes.sign() == votes.sum(0).sign()
        return (votes * agrees).sum(0) / agrees.sum(0).clamp(min=1)

    return merged


@pytest.mark.parametrize("density", [0.2, 0.7, 1.0])
def test_ties_in_delta_space(density: float) -> None:
    parents = [made(0), made(1), made(2)]
    method = TiesConfig(density=density)
    child = merge(parents, weights=[2, 2, 2], method=method, rank=12)
    assert_deltas(child, per_layer(parents, ties_of(density)), relative=1e-4)


def test_ties_weights_count_in_the_election_and_in_the_mean() -> None:
    parents = [made(0), made(1)]

    def merged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        agree = x.sign() == y.sign()
        winner = torch.where((0.25 * x.abs()) > (0.75 * y.abs()), x, y)
        return torch.where(agree, 0.25 * x + 0.75 * y, winner)

    method = TiesConfig(density=1.0)
    child = merge(parents, weights=[1, 3], method=method, rank=12)
    assert_deltas(child, per_layer(parents, merged), relative=1e-4)


def test_dare_in_delta_space_is_unbiased() -> None:
    parents = [made(0), made(1)]
    expected = per_layer(parents, lambda x, y: 0.25 * x + 0.75 * y)
    spread = per_layer(
        parents,
        lambda x, y: ((0.25 * x).square() + (0.75 * y).square()).sqrt() * (0.3 / 0.7) ** 0.5,
    )
    num = 200
    totals = {layer: torch.zeros_like(delta) for layer, delta in expected.items()}
    for seed in range(num):
        child = merge(parents, weights=[1, 3], method=DareConfig(), rank=12, key=(seed,))
        for layer, delta in dense(child).items():
            totals[layer] += delta / num
    for layer, mean in totals.items():
        z = (mean - expected[layer]) / (spread[layer] / num**0.5)
        assert z.abs().max() < 5 and 0.8 < z.std() < 1.2


@pytest.mark.parametrize("method", [DareConfig(), DareTiesConfig()])
def test_equal_layers_drop_other_entries(method: DareConfig | DareTiesConfig) -> None:
    lora = made(0).factors["model.layers.0.mlp.up_proj"]
    twins = make_adapter("twins", base="", factors={"p": lora, "q": lora})
    child = merge([twins, twins], weights=[1, 1], method=method, key=(1,))
    p, q = (child.factors[layer] for layer in "pq")
    assert not torch.allclose(p.b @ p.a, q.b @ q.a, atol=1e-2)


def test_density_one_drops_nothing() -> None:
    parents = [made(0), made(1)]
    weights = [0.3, 0.7]
    cases: list[tuple[MergeConfig, MergeConfig]] = [
        (DareConfig(density=1.0), LinearConfig()),
        (DareTiesConfig(density=1.0), TiesConfig(density=1.0)),
    ]
    for method, reference in cases:
        child = merge(parents, weights=weights, method=method, rank=12)
        assert_deltas(
            child, dense(merge(parents, weights=weights, method=reference, rank=12)), relative=1e-4
        )


def test_low_rank_is_close_to_the_best() -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(6, 80, generator=rng)
    matrix = torch.randn(60, 6, generator=rng) @ start
    matrix = matrix + 0.3 * matrix.abs().mean() * torch.randn(60, 80, generator=rng)
    for rank, limit in [(1, 1.00001), (6, 1.0001), (30, 1.01)]:
        a, b = low_rank(matrix, rank=rank, start=start)
        error = (matrix - b @ a).norm() / (matrix - best_of_rank(matrix, rank)).norm()
        assert error < limit


def test_change_rank_grows_exactly_and_shrinks_best() -> None:
    population = stack([made(0, scale=1.0)])
    layer = "model.layers.0.mlp.up_proj"
    delta = (population.b(layer) @ population.a(layer))[0]
    wide, narrow = change_rank(population, rank=7), change_rank(population, rank=2)
    assert torch.allclose((wide.b(layer) @ wide.a(layer))[0], delta, atol=1e-4)
    cut = (narrow.b(layer) @ narrow.a(layer))[0]
    assert torch.allclose(cut, best_of_rank(delta, 2), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "method"), [("svd", LinearConfig(normalise=False)), ("ties_svd", TiesConfig())]
)
def test_peft_agrees_where_it_is_exact(
    tmp_path: Path, kind: str, method: LinearConfig | TiesConfig
) -> None:
    """peft's `svd` merges build delta W and take its full SVD."""
    shapes = {
        "model.layers.0.self_attn.q_proj": (32, 32),
        "model.layers.1.mlp.up_proj": (32, 64),
    }
    parents = [made(seed, shapes=shapes) for seed in range(2)]
    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = PeftModel.from_pretrained(base, str(write_adapter(parents[0], tmp_path / "x")), "x")
    model.load_adapter(str(write_adapter(parents[1], tmp_path / "y")), "y")
    options = {"density": 0.7} if kind == "ties_svd" else {}
    model.add_weighted_adapter(
        ["x", "y"], [1.0, 1.0], "z", combination_type=kind, svd_rank=4, **options
    )
    ours = dense(merge(parents, weights=[1, 1], method=method, rank=4), shapes=shapes)
    modules = dict(model.base_model.model.named_modules())
    for layer, delta in ours.items():
        theirs = modules[layer].get_delta_weight("z").double()
        assert (delta - theirs).norm() / theirs.norm() < 1e-3
