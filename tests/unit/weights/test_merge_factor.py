"""Merging a and b apart, on stacks: closed forms, peft's tensor functions, exact selection."""

import pytest
import torch
from peft.utils import merge_utils
from weights.made import made

from rookery.types import Adapter
from rookery.weights.merge import (
    Cross,
    DareConfig,
    DareTiesConfig,
    LinearConfig,
    TiesConfig,
    merge,
    merge_stack,
)
from rookery.weights.merge.cross import BLOCK
from rookery.weights.stack import LayerShape, Layout, empty_stack, stack

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


def test_factor_wise_average_of_strangers_halves_the_update() -> None:
    """What `delta` space is there to avoid: about 0.5 of the size instead of 0.71."""
    shapes = {"p": (256, 256)}
    x, y = made(0, rank=8, shapes=shapes), made(1, rank=8, shapes=shapes)
    sizes = {}
    for method in (LinearConfig(space="factor"), LinearConfig()):
        lora = merge([x, y], weights=[1, 1], method=method, rank=16).factors["p"]
        parent = x.factors["p"]
        sizes[method.space] = float((lora.b @ lora.a).norm() / (parent.b @ parent.a).norm())
    assert sizes["factor"] == pytest.approx(0.5, abs=0.05)
    assert sizes["delta"] == pytest.approx(0.71, abs=0.05)


@pytest.mark.parametrize("density", [0.1, 0.7, 0.99])
def test_ties_is_what_peft_computes(density: float) -> None:
    parents = [made(0, shapes=WIDE), made(1, shapes=WIDE), made(2, shapes=WIDE)]
    method = TiesConfig(space="factor", density=density)
    child = merge(parents, weights=[1, 1, 1], method=method)
    for layer, factor, tensors in pairs(parents):
        expected = merge_utils.ties(tensors, torch.ones(3), density)
        assert torch.allclose(getattr(child.factors[layer], factor), expected, atol=1e-6)


@pytest.mark.parametrize("parts", [(1.0,), (0.5, 0.5), (0.1, 0.9), (0.2, 0.3, 0.5)])
@pytest.mark.parametrize("density", [0.4, 1.0])
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


def test_ties_without_an_elected_sign_is_zero() -> None:
    x = made(0)
    y = merge([x], weights=[-1], method=LinearConfig(space="factor", normalise=False))
    child = merge([x, y], weights=[1, 1], method=TiesConfig(space="factor"))
    assert all(not lora.a.any() and not lora.b.any() for lora in child.factors.values())


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
