"""Packing: every weighted token once, in its place, under the budget."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.errors import TrainError
from rookery.slots import ModelShape
from rookery.train.packing import check_batch, input_tokens, pack
from rookery.types import Datum

SHAPE = ModelShape(
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=8,
    vocab_size=50,
    context_tokens=12,
    eos_tokens=(),
)


@st.composite
def data(draw: st.DrawFn) -> Datum:
    size = draw(st.integers(1, 9))
    tokens = draw(st.lists(st.integers(0, 49), min_size=size, max_size=size))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=size, max_size=size))
    return Datum(tokens=tuple(tokens), weights=(0.0, *weights[1:]))


@settings(deadline=None)
@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_every_weighted_token_is_predicted_once_from_what_is_before_it(
    batch: list[Datum], pass_tokens: int
) -> None:
    expected = [
        (datum.tokens[:i], datum.tokens[i], weight)
        for datum in batch
        for i, weight in enumerate(datum.weights)
        if weight
    ]
    got = []
    for packed in pack(batch, pass_tokens=pass_tokens):
        starts = [sum(packed.lengths[:i]) for i in range(len(packed.lengths))]
        assert sum(packed.lengths) <= pass_tokens or len(packed.sequences) == 1
        assert len(set(packed.target_rows)) == len(packed.target_rows)
        for row, token, weight, datum in zip(
            packed.target_rows, packed.target_tokens, packed.weights, packed.datum, strict=True
        ):
            place = row - starts[datum]
            assert 0 <= place < packed.lengths[datum]
            got.append((packed.sequences[datum][: place + 1], token, weight))
    assert got == expected


@settings(deadline=None)
@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_passes_are_filled(batch: list[Datum], pass_tokens: int) -> None:
    passes = pack(batch, pass_tokens=pass_tokens)
    for one, following in pairwise(passes):
        assert sum(one.lengths) + following.lengths[0] > pass_tokens
    assert all(length > 0 for packed in passes for length in packed.lengths)


def test_the_worked_example() -> None:
    batch = [
        Datum(tokens=(5, 6, 7, 8), weights=(0.0, 0.0, 1.0, 1.0)),
        Datum(tokens=(5, 9, 2), weights=(0.0, 2.0, 0.0)),
        Datum(tokens=(5, 9), weights=(0.0, 0.0)),
    ]
    [packed] = pack(batch, pass_tokens=4)
    assert packed.sequences == ((5, 6, 7), (5,))
    assert packed.target_rows == (1, 2, 3)
    assert packed.target_tokens == (7, 8, 9)
    assert packed.weights == (1.0, 1.0, 2.0)
    assert packed.datum == (0, 0, 1)
    assert packed.sampled is None and packed.advantages is None
    assert input_tokens(batch[2]) == ()
    assert len(pack(batch, pass_tokens=3)) == 2


def test_data_that_cannot_be_trained_on_are_refused() -> None:
    good = Datum(tokens=(5, 6, 7), weights=(0.0, 1.0, 1.0))
    cases = {
        "3 tokens and 2 weights": replace(good, weights=(0.0, 1.0)),
        "NaN or infinite": replace(good, weights=(0.0, 1.0, float("nan"))),
        "weight 1 on its first token": replace(good, weights=(1.0, 1.0, 1.0)),
        "has 13 tokens to read; this model reads at most 12": Datum(
            tokens=(1,) * 14, weights=(0.0,) * 13 + (1.0,)
        ),
        "has the token 50": replace(good, tokens=(5, 6, 50)),
        "has the token -1": replace(good, tokens=(5, -1, 7)),
        "3 tokens and 2 logprobs": replace(good, logprobs=(0.0, 1.0)),
        "has advantages, unlike the first": replace(good, advantages=(0.0, 1.0, 1.0)),
    }
    for message, datum in cases.items():
        with pytest.raises(TrainError, match=f"Datum 1 of the batch .*{message}"):
            check_batch([good, datum], shape=SHAPE)
    for batch in ([], [Datum(tokens=(5, 6), weights=(0.0, 0.0))]):
        with pytest.raises(TrainError, match="no token with a weight"):
            check_batch(batch, shape=SHAPE)
    check_batch([good, Datum(tokens=(1,) * 13, weights=(0.0,) * 12 + (1.0,))], shape=SHAPE)
