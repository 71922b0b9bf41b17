"""Mutation: as often and as large as asked, reproducible, and able to leave zero."""

import pytest
import torch
from weights.made import dense, made

from rookery.types import Adapter
from rookery.weights.init import zero_adapter
from rookery.weights.mutate import GaussianConfig, mutate
from rookery.weights.stack import LayerShape, Layout

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
    assert mutation.is_mutated and mutation.sigma == 0.15
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
    mutated = [m for m in mutations if m.is_mutated]
    assert len(mutated) / 400 == pytest.approx(0.3, abs=0.08)
    assert all(m.adapter is adapter for m in mutations if not m.is_mutated)
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
