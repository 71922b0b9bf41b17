"""Stacks: one tensor for a population, without changing any delta W."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.made import SHAPES, dense, made

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.stack import (
    LayerShape,
    Layout,
    layout_of,
    places,
    random_adapter,
    stack,
    unstack,
    zero_adapter,
)


def test_adapters_of_one_scale_come_back_bit_for_bit() -> None:
    few = {layer: SHAPES[layer] for layer in list(SHAPES)[:1]}
    adapters = [made(0, rank=3), made(1, rank=1), made(2, rank=5, shapes=few)]
    population = stack(adapters)
    assert population.layout.rank == 5
    back = unstack(population, names=[adapter.name for adapter in adapters])
    assert [a.version for a in back] == [a.version for a in adapters]
    assert [list(a.factors) for a in back] == [list(a.factors) for a in adapters]


@settings(max_examples=20)
@given(
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    scales=st.lists(st.sampled_from([0.25, 1.0, 1.7, -2.0]), min_size=4, max_size=4),
)
def test_no_delta_changes(ranks: list[int], scales: list[float]) -> None:
    adapters = [made(i, rank=rank, scale=scales[i]) for i, rank in enumerate(ranks)]
    population = stack(adapters)
    scale = population.layout.scale
    for row, adapter in enumerate(adapters):
        for layer, delta in dense(adapter).items():
            product = scale * population.b(layer)[row] @ population.a(layer)[row]
            assert torch.allclose(product.double(), delta, atol=1e-4)


def test_views_share_the_one_contiguous_tensor() -> None:
    population = stack([made(0), made(1)])
    assert population.data.is_contiguous()
    layer = next(iter(SHAPES))
    population.data.zero_()
    assert not population.a(layer).any() and not population.b(layer).any()
    spans = [(p.start, p.stop) for p in places(population.layout)]
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def test_dtype_is_kept_when_shared_and_widened_when_not() -> None:
    half = _as_dtype(made(0), torch.bfloat16)
    assert stack([half]).data.dtype == torch.float32
    back = unstack(stack([half]), names=[half.name])[0]
    assert back.version == half.version
    assert layout_of([half, made(1)]).dtype == torch.float32


def test_absent_layers_stay_absent() -> None:
    one, other = list(SHAPES)[:2]
    left = made(0, shapes={one: SHAPES[one]})
    right = made(1, shapes={other: SHAPES[other]})
    population = stack([left, right])
    assert population.ranks == ((3, 0), (0, 3))
    assert not population.b(other)[0].any()
    assert [set(a.factors) for a in unstack(population, names=["l", "r"])] == [{one}, {other}]


def test_what_cannot_share_a_layout_is_a_sentence() -> None:
    layer = next(iter(SHAPES))
    with pytest.raises(AdapterError, match="maps 4 to 4"):
        stack([made(0), made(1, shapes={layer: (4, 4)})])
    stranger = made(1)
    stranger = make_adapter("x", base="other", factors=stranger.factors)
    with pytest.raises(AdapterError, match="different base models"):
        stack([made(0), stranger])
    with pytest.raises(AdapterError, match="no adapter with layers"):
        stack([])
    with pytest.raises(AdapterError, match="1 names for 2 rows"):
        unstack(stack([made(0), made(1)]), names=["x"])


def test_two_names_of_one_base_share_a_layout() -> None:
    names = ["smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    both = [make_adapter(str(i), base=names[i], factors=made(i).factors) for i in range(2)]
    assert layout_of(both).base == "smollm2"


def test_a_layout_can_be_given() -> None:
    layout = Layout(base="", layers=(LayerShape("p", 4, 6), LayerShape("q", 4, 4)), rank=4)
    adapter = made(0, rank=2, scale=1.0, shapes={"p": (4, 6)})
    population = stack([adapter], layout=layout)
    assert population.a("p").shape == (1, 4, 4) and population.b("q").shape == (1, 4, 4)


def _as_dtype(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    factors = {
        layer: LoraFactors(a=f.a.to(dtype), b=f.b.to(dtype), scale=f.scale)
        for layer, f in adapter.factors.items()
    }
    return make_adapter(adapter.name, base=adapter.base, factors=factors)


# Starting adapters.


LAYOUT = Layout(
    base="tiny", layers=(LayerShape("p", 64, 96), LayerShape("q", 96, 64)), rank=4, scale=2.0
)


def test_zero_has_no_delta_but_a_live_a() -> None:
    adapter = zero_adapter(LAYOUT, name="z", seed=(0,))
    for layer in LAYOUT.layers:
        lora = adapter.factors[layer.name]
        assert not lora.b.any() and lora.a.shape == (4, layer.num_in)
        bound = layer.num_in**-0.5
        assert lora.a.abs().max() <= bound and lora.a.std() > 0.4 * bound
    assert adapter.base == "tiny"


@pytest.mark.parametrize("size", [1e-3, 0.2])
def test_random_is_as_large_as_asked(size: float) -> None:
    adapter = random_adapter(LAYOUT, name="r", seed=(3,), size=size)
    for lora in adapter.factors.values():
        delta = lora.scale * lora.b @ lora.a
        assert 0.7 * size < delta.std() < 1.4 * size


def test_seeds_make_distinct_states_and_the_same_seed_the_same() -> None:
    versions = {random_adapter(LAYOUT, name="r", seed=(1, i)).version for i in range(20)}
    versions |= {zero_adapter(LAYOUT, name="z", seed=(1, i)).version for i in range(20)}
    assert len(versions) == 40
    again = random_adapter(LAYOUT, name="other", seed=(1, 7))
    assert again.version in versions
    p, q = (again.factors[name].a for name in "pq")
    assert not torch.equal(p[:, :64], q[:, :64])
