"""The k-th largest magnitude is exact for any size, any k, any distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.weights.merge.magnitude import kth_magnitude


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60_000),
    fraction=st.floats(0, 1),
    kind=st.sampled_from(["normal", "heavy", "equal", "sparse", "sorted", "few"]),
    seed=st.integers(0, 1000),
)
def test_equals_topk(size: int, fraction: float, kind: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=rng)
    values = {
        "normal": values,
        "heavy": values.exp() ** 4 * values.sign(),
        "equal": torch.full((size,), -0.5),
        "sparse": values * (values > 1),
        "sorted": values.sort().values,
        "few": values.round(),
    }[kind]
    k = max(1, int(fraction * size))
    assert kth_magnitude(values.flatten().numpy(), k=k) == float(values.abs().topk(k).values[-1])


def test_columns_of_very_different_size_do_not_fool_the_sample() -> None:
    values = torch.randn(1024, 64) * torch.logspace(-4, 4, 64)
    k = int(0.7 * values.numel())
    assert kth_magnitude(values.flatten().numpy(), k=k) == float(
        values.abs().flatten().topk(k).values[-1]
    )


@pytest.mark.parametrize("size", [0, 5, 20_000])
def test_none_kept_is_infinity(size: int) -> None:
    assert kth_magnitude(np.ones(size, np.float32), k=0) == float("inf")
