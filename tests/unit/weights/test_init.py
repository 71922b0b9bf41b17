"""Starting adapters: zero means zero, random means as large as asked, seeds mean distinct."""

import pytest
import torch

from rookery.weights.init import random_adapter, zero_adapter
from rookery.weights.stack import LayerShape, Layout

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
