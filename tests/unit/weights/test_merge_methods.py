"""Merging delta W: every operator against its dense closed form, and against peft's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.utils import merge_utils
from tiny import SIZES
from transformers import LlamaConfig, LlamaForCausalLM
from weights.made import SHAPES, best_of_rank, dense, made

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter, write_adapter
from rookery.weights.merge import (
    Cross,
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    block_names,
    change_rank,
    merge,
    merge_by_block,
    merge_stack,
)
from rookery.weights.merge.children import low_rank
from rookery.weights.merge.cross import BLOCK
from rookery.weights.stack import LayerShape, Layout, empty_stack, stack

Dense = dict[str, torch.Tensor]


def assert_deltas(child: Adapter, expected: Dense, *, relative: float = 1e-5) -> None:
    for layer, delta in dense(child).items():
        limit = relative * max(1.0, float(expected[layer].abs().max()))
        assert float((delta - expected[layer]).abs().max()) <= limit, layer


def per_layer(parents: list[Adapter], function: Callable[..., torch.Tensor]) -> Dense:
    deltas = [dense(parent) for parent in parents]
    return {layer: function(*(delta[layer] for delta in deltas)) for layer in SHAPES}


@settings(max_examples=25)
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


@pytest.mark.parametrize("density", [0.2, 1.0])
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
    num = 100
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


# Merging a and b apart, on stacks.


WIDE = {"p": (700, 70), "q": (64, 9000)}
"""Large enough for the sampled selection and for factors that cross blocks."""


def pairs(parents: list[Adapter]) -> list[tuple[str, str, list[torch.Tensor]]]:
    """(layer, factor, the parents' tensors) for every factor."""
    return [
        (layer, factor, [getattr(parent.factors[layer], factor) for parent in parents])
        for layer in parents[0].factors
        for factor in ("a", "b")
    ]


def test_linear_is_the_weighted_sum_of_each_factor() -> None:
    parents = [made(0), made(1), made(2)]
    method = LinearConfig(space="factor")
    child = merge(parents, weights=[1, 2, 1], method=method)
    for layer, factor, (x, y, z) in pairs(parents):
        expected = 0.25 * x + 0.5 * y + 0.25 * z
        assert torch.allclose(getattr(child.factors[layer], factor), expected, atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.7, 0.99])
def test_ties_is_what_peft_computes(density: float) -> None:
    parents = [made(0, shapes=WIDE), made(1, shapes=WIDE), made(2, shapes=WIDE)]
    method = TiesConfig(space="factor", density=density)
    child = merge(parents, weights=[1, 1, 1], method=method)
    for layer, factor, tensors in pairs(parents):
        expected = merge_utils.ties(tensors, torch.ones(3), density)
        assert torch.allclose(getattr(child.factors[layer], factor), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "density"), [((1.0,), 0.4), ((0.1, 0.9), 1.0), ((0.2, 0.3, 0.5), 0.4)]
)
def test_ties_of_equal_parents_is_the_trimmed_parent(
    parts: tuple[float, ...], density: float
) -> None:
    parent = made(0, shapes=WIDE)
    method = TiesConfig(space="factor", density=density)
    child = merge([parent] * len(parts), weights=parts, method=method)
    for layer, factor, (x,) in pairs([parent]):
        k = int(density * x.numel())
        least = x.abs().flatten().topk(k).values[-1]
        expected = torch.where(x.abs() >= least, x, 0)
        made_factor = getattr(child.factors[layer], factor)
        assert torch.allclose(made_factor, expected, rtol=1e-6)
        assert int((made_factor != 0).sum()) == k


def test_ties_trims_a_small_rank_by_its_own_size() -> None:
    """The zeros that fill rank 1 to 4 are not entries to keep."""
    small, large = made(0, rank=1, shapes=WIDE), made(1, rank=4, shapes=WIDE)
    method = TiesConfig(space="factor", density=0.5)
    child = merge([small, large], weights=[1, 0], method=method)
    for layer, _, (x,) in pairs([small])[::2]:
        assert int((child.factors[layer].a != 0).sum()) == int(0.5 * x.numel())


def test_dare_keeps_or_drops_each_entry_by_itself() -> None:
    x = made(0, rank=125, shapes={"p": (250, 250)})
    child = merge([x], weights=[1], method=DareConfig(space="factor"), key=(5,))
    for _, factor, (tensor,) in pairs([x]):
        ratio = getattr(child.factors["p"], factor) / tensor
        kept = ratio != 0
        assert torch.allclose(ratio[kept], torch.tensor(1 / 0.7), rtol=1e-4)
        assert kept.float().mean() == pytest.approx(0.7, abs=0.012)
        # Rows and columns are no units: their rates spread as those of single coins do.
        for dim in (0, 1):
            rates = kept.float().mean(dim)
            expected = (0.7 * 0.3 / kept.shape[dim]) ** 0.5
            assert 0.75 < rates.std() / expected < 1.25


def test_dare_masks_of_parents_children_and_blocks_are_unrelated() -> None:
    length = 40 * BLOCK
    layout = Layout(base="", layers=(LayerShape("p", length - 64, 1),), rank=1)
    population = empty_stack(layout, num_rows=2)
    population.data.fill_(1)
    crosses = [Cross(parents=(0,), weights=(1,), key=(child,)) for child in range(2)]
    crosses.append(Cross(parents=(0, 1), weights=(0, 1), key=(0,)))
    children = merge_stack(population, crosses=crosses, method=DareConfig(space="factor"))
    kept = children.data[:, : 39 * BLOCK] != 0
    assert torch.allclose(kept.double().mean(1), torch.tensor(0.7).double(), atol=4e-3)
    blocks = kept[0].view(39, BLOCK).double()
    for rows in (kept.double(), blocks):
        correlations = torch.corrcoef(rows) - torch.eye(len(rows))
        assert correlations.abs().max() < 6 / BLOCK**0.5


def test_dare_is_unbiased_and_sums_the_parents() -> None:
    parents = [made(0), made(1)]
    num, method = 500, DareConfig(space="factor", density=0.5)
    population = stack(parents)
    crosses = [Cross(parents=(0, 1), weights=(1, 3), key=(i,)) for i in range(num)]
    mean = merge_stack(population, crosses=crosses, method=method).data.mean(0)
    expected = 0.25 * population.data[0] + 0.75 * population.data[1]
    size = (0.25 * population.data[0]).square() + (0.75 * population.data[1]).square()
    z = (mean - expected) / (size.sqrt() / num**0.5).clamp(min=1e-9)
    assert z.abs().max() < 5


def test_dare_ties_elects_among_what_is_left() -> None:
    x, y = made(0, shapes=WIDE), made(1, shapes=WIDE)
    method = DareTiesConfig(space="factor", density=0.6)
    child = merge([x, y], weights=[1, 1], method=method, key=(3,))
    grown = 65536 / round(0.6 * 65536)
    for layer, factor, (p, q) in pairs([x, y]):
        p, q, got = p * grown, q * grown, getattr(child.factors[layer], factor)
        both = torch.where(p.sign() == q.sign(), (p + q) / 2, torch.where(p.abs() > q.abs(), p, q))
        options = torch.stack([torch.zeros_like(p), p, q, both])
        distance = (options - got).abs() / (1 + got.abs())
        assert distance.min(0).values.max() < 1e-5
        assert (got == 0).float().mean() == pytest.approx(0.16, abs=0.02)


# Sums of adapters with weights of their own for every block.


BLOCKS = ("model.layers.9", "model.layers.10")


def random_adapter(seed: int, blocks: tuple[str, ...] = BLOCKS) -> Adapter:
    draw = torch.Generator().manual_seed(seed)
    factors = {
        f"{block}.self_attn.{kind}": LoraFactors(
            a=torch.randn(2, 6, generator=draw), b=torch.randn(5, 2, generator=draw), scale=1.0
        )
        for block in blocks
        for kind in ("q_proj", "v_proj")
    }
    return make_adapter(f"f{seed}", base="tiny", factors=factors)


def delta(adapter: Adapter, layer: str) -> torch.Tensor:
    own = adapter.factors[layer]
    return own.scale * own.b @ own.a


def test_every_block_has_its_own_weights() -> None:
    one, two = random_adapter(1), random_adapter(2)
    child = merge_by_block([one, two], weights=(0.5, 1.0, 0.0, 2.0), rank=4)
    assert set(child.factors) == set(one.factors)
    for layer in child.factors:
        weights = (0.5, 1.0) if ".9." in layer else (0.0, 2.0)
        expected = weights[0] * delta(one, layer) + weights[1] * delta(two, layer)
        assert torch.allclose(delta(child, layer), expected, atol=1e-4)


def test_blocks_are_in_the_order_of_the_model_and_may_be_missing_in_a_parent() -> None:
    one, two = random_adapter(1), random_adapter(2, BLOCKS[1:])
    assert block_names([two, one]) == BLOCKS
    child = merge_by_block([one, two], weights=(0.5, 9.0, 1.0, 1.0), rank=4)
    layer = "model.layers.9.self_attn.q_proj"
    assert torch.allclose(delta(child, layer), 0.5 * delta(one, layer), atol=1e-4)


def test_a_wrong_number_of_weights_is_refused() -> None:
    with pytest.raises(AdapterError, match="give 4"):
        merge_by_block([random_adapter(1), random_adapter(2)], weights=(1.0, 1.0), rank=4)
