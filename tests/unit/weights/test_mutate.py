"""Mutation: as often and as large as asked, reproducible, and able to leave zero."""

import numpy as np
import pytest
import torch
from weights.made import dense, made

from rookery.errors import AdapterError
from rookery.seeding import bulk_stream
from rookery.types import Adapter
from rookery.weights.mutate import GaussianConfig, accumulate, mutate, perturb
from rookery.weights.stack import LayerShape, Layout, bernoulli_positions, zero_adapter

WIDE = {"p": (400, 300), "q": (200, 500)}


def changes(old: Adapter, new: Adapter) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(old tensor, new - old) of every factor."""
    return [
        (getattr(f, factor), getattr(new.factors[layer], factor) - getattr(f, factor))
        for layer, f in old.factors.items()
        for factor in ("a", "b")
    ]


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_relative_noise_has_the_rate_and_the_spread_asked_for(rate: float) -> None:
    adapter = made(0, rank=16, shapes=WIDE, size=0.02)
    method = GaussianConfig(sigma=0.15, gene_rate=rate)
    mutation = mutate(adapter, method=method, key=(1, 2, 3))
    assert mutation.adapter is not adapter and mutation.sigma == 0.15
    for tensor, change in changes(adapter, mutation.adapter):
        moved = change[change != 0]
        assert len(moved) / change.numel() == pytest.approx(rate, abs=0.04)
        assert moved.std() == pytest.approx(0.15 * float(tensor.std()), rel=0.15)
        assert abs(moved.mean()) < 5 * moved.std() / len(moved) ** 0.5


def test_absolute_noise_ignores_the_tensor() -> None:
    adapter = made(0, rank=16, shapes=WIDE, size=5.0)
    method = GaussianConfig(sigma=0.01, relative=False)
    for _, change in changes(adapter, mutate(adapter, method=method, key=(1,)).adapter):
        assert change.std() == pytest.approx(0.01, rel=0.1)


def test_a_candidate_is_changed_as_often_as_asked() -> None:
    adapter = made(0)
    method = GaussianConfig(candidate_rate=0.3)
    mutations = [mutate(adapter, method=method, key=(0, i)) for i in range(400)]
    mutated = [m for m in mutations if m.adapter is not adapter]
    assert len(mutated) / 400 == pytest.approx(0.3, abs=0.08)
    assert len({m.adapter.version for m in mutated}) == len(mutated)


def test_the_same_key_gives_the_same_bits() -> None:
    adapter, method = made(0), GaussianConfig(gene_rate=0.5)
    one = mutate(adapter, method=method, key=(1, 2), sigma=0.2)
    two = mutate(adapter, method=method, key=(1, 2), sigma=0.2)
    other = mutate(adapter, method=method, key=(1, 3), sigma=0.2)
    assert one.adapter.version == two.adapter.version and one.sigma == two.sigma
    assert one.adapter.version != other.adapter.version
    assert one.adapter.name == adapter.name


def test_layers_of_one_shape_get_their_own_noise() -> None:
    adapter = made(0, shapes={"p": (20, 20), "q": (20, 20)}, size=0.0)
    mutated = mutate(adapter, method=GaussianConfig(relative=False), key=(1,)).adapter
    assert not torch.equal(mutated.factors["p"].a, mutated.factors["q"].a)


def test_a_zero_adapter_can_leave_zero() -> None:
    layout = Layout(base="", layers=(LayerShape("p", 64, 48),), rank=4)
    zero = zero_adapter(layout, name="z", seed=(0,))
    moved = mutate(zero, method=GaussianConfig(sigma=0.1), key=(1,)).adapter.factors["p"]
    assert (moved.b @ moved.a).abs().max() > 0
    assert moved.b.std() == pytest.approx(0.1 * float(zero.factors["p"].a.std()), rel=0.3)
    nothing = made(0, size=0.0)
    assert any(
        delta.any()
        for delta in dense(mutate(nothing, method=GaussianConfig(), key=(1,)).adapter).values()
    )


def test_dtype_is_kept() -> None:
    adapter = made(0)
    half = {k: type(f)(f.a.bfloat16(), f.b.bfloat16(), f.scale) for k, f in adapter.factors.items()}
    adapter = type(adapter)(name="h", base="", factors=half, version="")
    mutated = mutate(adapter, method=GaussianConfig(gene_rate=0.5), key=(1,)).adapter
    assert {f.b.dtype for f in mutated.factors.values()} == {torch.bfloat16}


def test_a_sigma_of_the_method_is_obeyed_by_every_candidate() -> None:
    adapter = made(3)
    fixed = mutate(adapter, method=GaussianConfig(sigma=0.3), key=(1,), sigma=0.01)
    own = mutate(adapter, method=GaussianConfig(), key=(1,), sigma=0.3)
    assert fixed.sigma == 0.3
    assert fixed.adapter.version == own.adapter.version


def test_a_strength_that_would_not_be_inherited_is_refused() -> None:
    with pytest.raises(ValueError, match="adapt"):
        GaussianConfig.model_validate({"adapt": 0.3})


# Seeded noise.


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


def test_one_amount_per_seed() -> None:
    with pytest.raises(AdapterError, match="1 seeds and 2 amounts"):
        accumulate(made(0), seeds=[(1,)], amounts=[1, 2])


# Draws.


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.9, 1.0])
def test_positions_are_independent_coins(rate: float) -> None:
    num, places = 200_000, bernoulli_positions(bulk_stream("coins"), num_places=200_000, rate=rate)
    assert len(set(places.tolist())) == len(places)
    assert (np.diff(places) > 0).all() and (len(places) == 0 or 0 <= places[0] <= places[-1] < num)
    spread = (num * rate * (1 - rate)) ** 0.5
    assert abs(len(places) - num * rate) <= 5 * spread
    # Every tenth of the row gets its part: gaps do not drift.
    counts = np.bincount(places * 10 // num, minlength=10)
    assert np.abs(counts - num * rate / 10).max() <= 5 * spread / 10**0.5 + 1e-9


def test_first_place_is_as_likely_as_any() -> None:
    hits = sum(
        0 in bernoulli_positions(bulk_stream("first", seed), num_places=5, rate=0.3)
        for seed in range(2000)
    )
    assert abs(hits / 2000 - 0.3) < 0.05
