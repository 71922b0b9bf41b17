"""The token pool: places are nobody's twice, come back, and keep their contents as it grows."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rookery.embedded.prefix import TokenPool, small_zero_pages, zero_pages


def make_pool(capacity: int) -> TokenPool:
    return TokenPool(kv_shape=(2, 1, 3), hidden_size=4, like=torch.empty(0), capacity=capacity)


STEPS = st.lists(
    st.tuples(st.just("take"), st.integers(0, 9)) | st.tuples(st.just("give"), st.integers(0, 20)),
    max_size=30,
)


@given(capacity=st.integers(1, 12), steps=STEPS)
def test_against_a_dict_of_owners(capacity: int, steps: list[tuple[str, int]]) -> None:
    pool = make_pool(capacity)
    owned: list[tuple[torch.Tensor, float]] = []
    for number, (action, argument) in enumerate(steps):
        if action == "take":
            places = pool.take(argument)
            assert places.shape == (argument,)
            pool.hidden[places] = number + 1.0
            pool.kv[:, :, :, places] = number + 1.0
            owned.append((places, number + 1.0))
        elif owned:
            pool.give_back(owned.pop(argument % len(owned))[0])
        flat = [int(place) for places, _ in owned for place in places]
        assert len(flat) == len(set(flat)) == pool.num_taken
        assert all(0 <= place < len(pool.hidden) for place in flat)
        for places, mark in owned:
            assert (pool.hidden[places] == mark).all() and (pool.kv[:, :, :, places] == mark).all()
    for places, _ in owned:
        pool.give_back(places)
    assert pool.num_taken == 0
    capacity = len(pool.hidden)
    assert sorted(pool.take(capacity).tolist()) == list(range(capacity)), "none was lost"
    assert len(pool.hidden) == capacity, "and none is missing"


def test_it_grows_by_half_or_by_what_is_missing() -> None:
    pool = make_pool(10)
    pool.take(11)
    assert pool.kv.shape == (2, 2, 1, 15, 3) and pool.hidden.shape == (15, 4)
    pool.take(40)
    assert len(pool.hidden) == 51 and pool.num_taken == 51


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_token_takes_the_memory_of_its_own_pages() -> None:
    """In huge pages the 96 parts that a token lies in would take 192 MB."""
    like = torch.empty(0)
    pool = TokenPool(kv_shape=(12, 4, 64), hidden_size=64, like=like, capacity=50_000)
    before = resident_bytes()
    places = pool.take(16)
    pool.kv[:, :, :, places] = 1.0
    pool.hidden[places] = 1.0
    assert resident_bytes() - before < 8 * 2**20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_taken_places_are_the_takers_own() -> None:
    """What a taker does with its tensor does not reach the pool's list of free places."""
    pool = make_pool(4)
    pool.take(2).fill_(99)
    places = pool.take(2)
    pool.give_back(places)
    assert sorted(pool.take(2).tolist()) == sorted(places.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [zero_pages, small_zero_pages])
def test_zero_pages_are_zeros_of_the_right_kind(make: Any, dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    pages = make((3, 2, 5), like=like)
    assert pages.dtype == dtype and pages.shape == (3, 2, 5) and not pages.any()
    pages[1] = 2
    assert pages.sum() == 20, "and can be written"
    assert make((0, 7), like=like).shape == (0, 7)
