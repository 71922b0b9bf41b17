"""Sums of adapters with weights of their own for every block."""

import pytest
import torch

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merge import block_names, merge_by_block

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
