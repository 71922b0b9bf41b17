"""Saved states: exact floats, and a sentence for documents of another kind."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.search.fitness import Fitness
from rookery.search.islands import Islands
from rookery.search.state import dump, load

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(score=finite, objectives=st.lists(finite).map(tuple), violation=finite.map(abs))
def test_floats_survive_exactly(score, objectives, violation) -> None:
    fitness = Fitness(score=score, objectives=objectives, violation=violation)
    assert load(Fitness, json.loads(json.dumps(dump(fitness)))) == fitness


def test_other_documents_are_refused() -> None:
    with pytest.raises(RunError, match="saved search state Islands"):
        load(Islands, {"score": 1.0})
    with pytest.raises(RunError, match="Fitness"):
        load(Fitness, {"score": float("nan")})
