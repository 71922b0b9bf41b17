"""Documents: what is written reads back the same; what JSON cannot hold is refused by place."""

import json
import math
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.runs.disk import canonical, decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(values)
def test_round_trip_keeps_value_type_and_order(value: object) -> None:
    assert repr(decode(encode(value, what="it"), what="it")) == repr(value)


@given(values)
def test_text_is_json_for_every_parser(value: object) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(encode(value, what="it").encode(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0.5, math.nan]}, ['["a"][1]', "nan", "null"]),
        (math.inf, ["it is inf"]),
        ({"a": {1: "x"}}, ['["a"] has the key 1', "int", "str(key)"]),
        ({"a": np.float32(1)}, ['["a"]', "numpy.float32", "float("]),
        ({"a": b"x"}, ["bytes", "put_bytes"]),
        ({"a": MappingProxyType({})}, ["mappingproxy", "dict("]),
        ({"a": {1, 2}}, ["set", "list("]),
        ({"a": 10**5000}, ["as text"]),
    ],
)
def test_refusals_name_place_and_remedy(value: object, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        encode(value, what="The payload")
    assert all(word in str(caught.value) for word in ["The payload", *words]), str(caught.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(RunError, match="contains itself"):
        encode(loop, what="it")


def test_half_a_surrogate_pair_survives_and_other_text_stays_readable() -> None:
    assert decode(encode("\udcff ok", what="it").encode(), what="it") == "\udcff ok"
    assert encode("Grüße 日本", what="it") == '"Grüße 日本"'


def test_canonical_ignores_order_but_not_type() -> None:
    assert canonical('{"a": 1, "b": 2}') == canonical('{"b": 2, "a": 1}')
    assert canonical('{"a": 1}') != canonical('{"a": 1.0}') != canonical('{"a": true}')


def test_damaged_text_says_what_it_is() -> None:
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        decode('{"a": ', what="config.json")
