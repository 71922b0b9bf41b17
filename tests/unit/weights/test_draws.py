"""Draws: the same key, the same bits; other keys, other bits; coins as fair as stated."""

import numpy as np
import pytest

from rookery.weights.draws import bernoulli_positions, stream


def test_a_key_is_a_value() -> None:
    assert stream(1, 2, "x").random() == stream(1, 2, "x").random()
    assert stream(np.int64(1), 2).random() == stream(1, 2).random()
    draws = {stream(*key).random() for key in [(1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0), ()]}
    assert len(draws) == 6


def test_keys_that_agree_in_32_bits_differ() -> None:
    assert stream(5).random() != stream(5 + 2**32).random()


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.9, 1.0])
def test_positions_are_independent_coins(rate: float) -> None:
    num, places = 200_000, bernoulli_positions(stream("coins"), num_places=200_000, rate=rate)
    assert len(set(places.tolist())) == len(places)
    assert (np.diff(places) > 0).all() and (len(places) == 0 or 0 <= places[0] <= places[-1] < num)
    spread = (num * rate * (1 - rate)) ** 0.5
    assert abs(len(places) - num * rate) <= 5 * spread
    # Every tenth of the row gets its part: gaps do not drift.
    counts = np.bincount(places * 10 // num, minlength=10)
    assert np.abs(counts - num * rate / 10).max() <= 5 * spread / 10**0.5 + 1e-9


def test_first_place_is_as_likely_as_any() -> None:
    hits = sum(
        0 in bernoulli_positions(stream("first", seed), num_places=5, rate=0.3)
        for seed in range(2000)
    )
    assert abs(hits / 2000 - 0.3) < 0.05
