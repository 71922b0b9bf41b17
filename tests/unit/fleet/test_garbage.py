"""How often Python collects garbage while a fleet is open."""

import gc
from collections.abc import Iterator

import pytest

from rookery.fleet.fleet import OBJECTS, collected_rarely


@pytest.fixture(autouse=True)
def own_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_it_is_rarer_inside_and_as_before_afterwards() -> None:
    with pytest.raises(KeyError), collected_rarely():
        assert gc.get_threshold() == (OBJECTS, 10, 10)
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_of_two_that_overlap_the_second_leaves_nothing_behind() -> None:
    first, second = collected_rarely(), collected_rarely()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 10 * OBJECTS])
def test_what_the_program_chose_for_itself_stays(own: int) -> None:
    gc.set_threshold(own, 5, 5)
    with collected_rarely():
        assert gc.get_threshold() == (own, 5, 5)
    assert gc.get_threshold() == (own, 5, 5)
