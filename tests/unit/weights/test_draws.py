"""Draws: coins as fair as stated."""

import numpy as np
import pytest

from rookery.seeding import bulk_stream
from rookery.weights.init import bernoulli_positions


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
