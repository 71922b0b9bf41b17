"""Members of a population: their noise, their versions, and a strategy that learns from seeds."""

from hashlib import blake2b
from math import sqrt
from statistics import NormalDist

import numpy as np
import pytest
import torch
from weights.made import made

from rookery.fleet.perturbed import StepPopulation, moved
from rookery.fleet.vllm_plugin.population import LayerNoise
from rookery.types import Adapter

LAYERS = [("model.layers.0.q", 3, 10, 7), ("model.layers.1.q", 1, 5, 4)]


def expected(seed: int, layer: str, count: int) -> np.ndarray:
    """The numbers of one layer, in 32-bit words without signs and one at a time."""

    def mixed(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    digest = blake2b(layer.encode(), digest_size=8, person=b"rookery-noise").digest()
    key_low, key_high = np.frombuffer(digest, "<u4").tolist()
    low, high = seed % 2**32, seed >> 32
    first = mixed((mixed(key_low ^ low) + high) % 2**32)
    second = mixed((mixed(key_high ^ high) + low) % 2**32)
    numbers = []
    for place in range((count + 1) // 2):
        word = mixed((mixed(first ^ place) + second) % 2**32)
        for index in (word % 2**16, word >> 16):
            quantile = NormalDist().inv_cdf((min(index, 65535 - index) + 0.5) / 65536)
            numbers.append(round(quantile * 65536) / 65536 * (1 if index < 32768 else -1))
    return np.array(numbers[:count], np.float32)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_noise_is_that_of_an_independent_computation(rank: int) -> None:
    noise = LayerNoise(LAYERS, rank=rank)
    seeds = [7, 2**63 - 1, 2**40 + 3]
    drawn = noise.draw(seeds, torch.device("cpu"))
    for (name, lora_rank, num_in, num_out), (a, b) in zip(
        LAYERS, noise.factors(drawn), strict=True
    ):
        shapes = [(lora_rank, num_in), (num_out, lora_rank)]
        is_full = [min(shape) <= rank for shape in shapes]
        sizes = [
            rows * columns if full else rank * (rows + columns)
            for (rows, columns), full in zip(shapes, is_full, strict=True)
        ]
        for k, seed in enumerate(seeds):
            numbers = np.split(expected(seed, name, sum(sizes)), [sizes[0]])
            for part, (rows, columns), full, got in zip(
                numbers, shapes, is_full, (a[k], b[k]), strict=True
            ):
                left, right = np.split(part, [rank * rows]) if not full else (part, part)
                right_answer = (
                    part.reshape(rows, columns)
                    if full
                    else left.reshape(rank, rows).T @ right.reshape(rank, columns) / sqrt(rank)
                )
                np.testing.assert_allclose(got.numpy(), right_answer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "rank", "is_one_each"),
    [
        (("l", 1, 10, 6), 1, True),
        (("l", 1, 10, 7), 1, False),  # a number too many is drawn
        (("l", 2, 10, 6), 1, False),
        (("l", 2, 2, 2), 1, False),  # as many numbers, of which each is in several places
    ],
)
def test_a_number_for_each_place_is_not_told_by_how_many_there_are(
    layer: tuple[str, int, int, int], rank: int, is_one_each: bool
) -> None:
    assert LayerNoise([layer], rank=rank).is_one_each == is_one_each


def test_members_are_mirrored_and_the_update_is_the_sum_of_their_noise() -> None:
    centre = made(3)
    population = StepPopulation.around(centre, like=centre, rank=1)
    pairs = [
        [population.member("m", seed=seed, amount=amount) for amount in (0.5, -0.5)]
        for seed in (1, 2)
    ]
    assert len({member.version for pair in pairs for member in pair}) == 4
    step = moved(centre.factors, seeds=[1, 2], amounts=[0.25, -2.0], rank=1)
    for layer, lora in centre.factors.items():
        for x in "ab":
            (forth, back), (other, _) = (
                [getattr(member.factors[layer], x) for member in pair] for pair in pairs
            )
            own = getattr(lora, x)
            assert torch.allclose((forth + back) / 2, own, atol=1e-6)
            assert np.linalg.matrix_rank((forth - own).numpy(), tol=1e-4) == 1
            total = own + 0.25 * (forth - own) / 0.5 - 2.0 * (other - own) / 0.5
            assert torch.allclose(getattr(step[layer], x), total, atol=1e-5)


def test_members_are_rounded_to_the_dtype_of_the_adapter() -> None:
    centre = made(3)
    halves = {
        layer: type(lora)(a=lora.a.bfloat16(), b=lora.b.half(), scale=lora.scale)
        for layer, lora in centre.factors.items()
    }
    like = Adapter(name="like", base="tiny", factors=halves, version="1")
    member = StepPopulation.around(centre, like=like, rank=1).member("m", seed=1, amount=0.1)
    exact = StepPopulation.around(centre, like=centre, rank=1).member("m", seed=1, amount=0.1)
    for layer, lora in member.factors.items():
        assert torch.equal(lora.a, exact.factors[layer].a.bfloat16())
        assert torch.equal(lora.b, exact.factors[layer].b.half())
