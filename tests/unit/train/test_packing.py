"""Packing: every target once, in its place, under the budget."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.errors import TrainError
from rookery.slots import ModelShape
from rookery.train.packing import check_data, input_tokens, pack
from rookery.types import Datum, KeptTokens

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
    """Any number of targets per position, none at all too."""
    tokens = draw(st.lists(st.integers(0, 49), min_size=1, max_size=9))
    positions = sorted(draw(st.lists(st.integers(0, len(tokens) - 1), max_size=9)))
    num = len(positions)
    targets = draw(st.lists(st.integers(0, 49), min_size=num, max_size=num))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=num, max_size=num))
    return Datum(
        tokens=tuple(tokens),
        positions=tuple(positions),
        targets=tuple(targets),
        weights=tuple(weights),
        temperature=draw(st.sampled_from([1.0, 0.5])),
    )


@settings(deadline=None)
@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_every_target_is_predicted_once_from_what_is_before_it(
    batch: list[Datum], pass_tokens: int
) -> None:
    check_data(batch, shape=SHAPE)
    got: dict[int, list[tuple[tuple[int, ...], int, float, float]]] = {}
    for packed in pack(batch, pass_tokens=pass_tokens):
        starts = [sum(packed.lengths[:i]) for i in range(len(packed.lengths))]
        assert packed.num_tokens == sum(packed.lengths)
        assert packed.num_tokens <= pass_tokens or len(packed.sequences) == 1
        assert packed.predicting == sorted(set(packed.predicting))
        assert packed.target_rows == sorted(packed.target_rows)
        for row, token, weight, number in zip(
            packed.target_rows, packed.targets, packed.weights, packed.datum, strict=True
        ):
            place = packed.predicting[row] - starts[number]
            assert 0 <= place < packed.lengths[number]
            read = packed.sequences[number][: place + 1]
            target = (read, token, weight, packed.temperatures[row])
            got.setdefault(packed.places[number], []).append(target)
    assert got == {
        place: [
            (datum.tokens[: position + 1], target, weight, datum.temperature)
            for position, target, weight in zip(
                datum.positions, datum.targets, datum.weights, strict=True
            )
        ]
        for place, datum in enumerate(batch)
        if datum.targets
    }


@settings(deadline=None)
@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_passes_are_filled_and_equal_lengths_lie_together(
    batch: list[Datum], pass_tokens: int
) -> None:
    passes = pack(batch, pass_tokens=pass_tokens)
    for one, following in pairwise(passes):
        assert one.num_tokens + following.lengths[0] > pass_tokens
    lengths = [length for packed in passes for length in packed.lengths]
    assert lengths == sorted(lengths) and 0 not in lengths
    assert Counter(lengths) == Counter(len(input_tokens(d)) for d in batch if d.targets)


def test_the_worked_example() -> None:
    batch = [
        Datum(tokens=(5, 6, 7), positions=(1, 2), targets=(7, 8), weights=(1.0, 1.0)),
        Datum(tokens=(5, 9), positions=(0, 0), targets=(9, 4), weights=(2.0, 0.0)),
        Datum(tokens=(5, 9), positions=(), targets=(), weights=()),
    ]
    [packed] = pack(batch, pass_tokens=4)
    assert packed.places == [1, 0]
    assert packed.sequences == [(5,), (5, 6, 7)]
    assert packed.predicting == [0, 2, 3]
    assert packed.target_rows == [0, 0, 1, 2]
    assert packed.targets == [9, 4, 7, 8]
    assert packed.weights == [2.0, 0.0, 1.0, 1.0]
    assert packed.datum == [0, 0, 1, 1]
    assert packed.columns == {}
    assert input_tokens(batch[2]) == ()
    assert len(pack(batch, pass_tokens=3)) == 2


def test_data_that_cannot_be_trained_on_are_refused() -> None:
    good = Datum(tokens=(5, 6), positions=(0, 1), targets=(6, 7), weights=(1.0, 1.0))
    cases = {
        "2 targets and 1 weights": replace(good, weights=(1.0,)),
        "2 targets and 3 positions": replace(good, positions=(0, 1, 1)),
        "weights that are NaN or infinite": replace(good, weights=(1.0, float("nan"))),
        "positions that fall": replace(good, positions=(1, 0)),
        "positions 0 to 2; with 2 tokens they are 0 to 1": replace(good, positions=(0, 2)),
        "positions -1 to 1": replace(good, positions=(-1, 1)),
        "has 13 tokens to read; this model reads at most 12": Datum(
            tokens=(1,) * 13, positions=(12,), targets=(1,), weights=(1.0,)
        ),
        "has the token 50": replace(good, tokens=(5, 50)),
        "has the token -1": replace(good, targets=(-1, 7)),
        "temperature 0; it is a number above 0": replace(good, temperature=0.0),
        "2 targets and 1 kept": replace(good, kept=((6,),)),
        "target 7, which is not among the tokens kept": replace(good, kept=((6, 9), (6, 9))),
        "kept for it": replace(good, kept=((), (9,))),
        "the token 9 twice among those kept": replace(good, kept=((6, 9, 4, 9), ())),
    }
    cases |= {
        f"{message}(?# stored)": replace(datum, kept=KeptTokens.of(datum.kept))
        for message, datum in cases.items()
        if datum.kept
    }
    for message, datum in cases.items():
        with pytest.raises(TrainError, match=f"Datum 1 of the batch .*{message}"):
            check_data([good, datum], shape=SHAPE)
    short = replace(good, sampled_logprobs=(0.0,))
    with pytest.raises(TrainError, match="2 targets and 1 sampled_logprobs"):
        check_data([short], shape=SHAPE)
    with pytest.raises(TrainError, match=r"Datum 0 .*2 targets and 0 advantages"):
        check_data([good, replace(good, advantages=(0.0, 1.0))], shape=SHAPE)
    with pytest.raises(TrainError, match=r"Datum 0 .*2 targets and 0 advantages"):
        check_data([good], shape=SHAPE, needs=("advantages",))
    check_data([], shape=SHAPE)
    long = Datum(tokens=(1,) * 14, positions=(11,), targets=(1,), weights=(0.0,))
    check_data([good, long, replace(good, kept=((), (7, 9)))], shape=SHAPE)


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": (0.0, 1.0)},
        {"tokens": (5.0, 6.5)},
        {"targets": "67"},
        {"weights": (None, 1.0)},
        {"weights": (1.0, 10**400)},
        {"temperature": None},
        {"kept": (None, (7,))},
    ],
)
def test_values_of_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    good = Datum(tokens=(5, 6), positions=(0, 1), targets=(6, 7), weights=(1.0, 1.0))
    with pytest.raises(TrainError, match="Datum 1 of the batch has a value of a wrong type: "):
        check_data([good, replace(good, **fields)], shape=SHAPE)
