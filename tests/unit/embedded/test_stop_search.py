"""Stop strings found at the end of a growing text, exactly where decoding all of it finds them."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.embedded.sampling import StopSearch, TextDeltas

PIECES = [
    *(b" a", b"b", b"ab", b"\n", b"\n\n", b"<", b"END", b">"),
    *("\u00e9".encode(), "\u4e2d".encode()),
    *(bytes([byte]) for byte in "\U0001f600\u4e2d\u00e9".encode()),
]
SPECIAL = len(PIECES)
"""A token without a text."""


def of_bytes(tokens: Sequence[int]) -> str:
    """As byte-level tokenizers decode: a character may take several tokens."""
    return b"".join(PIECES[t] for t in tokens if t != SPECIAL).decode(errors="replace")


def stripped(tokens: Sequence[int]) -> str:
    """As SentencePiece does: a space at the very beginning is left out."""
    return of_bytes(tokens).removeprefix(" ")


def find_in_all(stops: Sequence[str], text: str) -> str | None:
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else None


TEXTS = ["\n\n", "\n", "<END>", "\u4e2d", "\U0001f600", "b b", "ab a", "\u00e9b", "a" * 40]
STOPS = st.lists(st.sampled_from(TEXTS), max_size=3)


@pytest.mark.parametrize("detokenize", [of_bytes, stripped])
@settings(max_examples=100)
@given(stops=STOPS, tokens=st.lists(st.integers(0, SPECIAL), max_size=300))
def test_it_finds_what_decoding_everything_finds(
    detokenize: Callable[[Sequence[int]], str], stops: list[str], tokens: list[int]
) -> None:
    search = StopSearch(stops, detokenize=detokenize)
    for num in range(1, len(tokens) + 1):
        found = search.find(tokens[:num])
        assert found == find_in_all(stops, detokenize(tokens[:num]))
        if found is not None:
            return


@settings(max_examples=50)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 8, 9, 10, 11, 12, 13]), min_size=200, max_size=400)
)
def test_a_stop_string_is_found_after_any_text(tokens: list[int]) -> None:
    search = StopSearch(["<END>"], detokenize=of_bytes)
    text: list[int] = []
    for token in tokens:
        text.append(token)
        assert search.find(text) is None
    for token in (5, 6):
        text.append(token)
        assert search.find(text) is None
    text.append(7)
    assert search.find(text) == of_bytes(tokens)


@pytest.mark.parametrize("detokenize", [of_bytes, stripped])
@settings(max_examples=100)
@given(stops=STOPS, tokens=st.lists(st.integers(0, SPECIAL), min_size=1, max_size=100))
def test_deltas_are_the_text_and_never_part_of_a_stop_string(
    detokenize: Callable[[Sequence[int]], str], stops: list[str], tokens: list[int]
) -> None:
    search = StopSearch(stops, detokenize=detokenize)
    deltas = TextDeltas(stops, detokenize=detokenize)
    told = ""
    for num in range(1, len(tokens) + 1):
        found = search.find(tokens[:num])
        if found is None and num == len(tokens):
            found = detokenize(tokens)
        told += deltas.add(tokens[:num], ended=found)
        assert deltas.num_tokens == num
        if found is not None:
            assert told == found
            return
        assert detokenize(tokens).startswith(told), "nothing that a later token changes"


def test_text_comes_as_soon_as_it_is_certain() -> None:
    deltas = TextDeltas(["<END>"], detokenize=of_bytes)
    smile = [PIECES.index(bytes([byte])) for byte in "\U0001f600".encode()]
    tokens, told = [0, *smile, 5, 6, 5, 1], []
    for num in range(1, len(tokens) + 1):
        told.append(deltas.add(tokens[:num]))
    assert told == [" a", "", "", "", "\U0001f600", "", "", "<END", "<b"]


@pytest.mark.parametrize("last", [0, 10])
def test_the_cost_of_a_step_does_not_grow(last: int) -> None:
    lengths: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return of_bytes(tokens)

    search = StopSearch(["<END>"], detokenize=counted)
    deltas = TextDeltas(["<END>"], detokenize=counted)
    text: list[int] = []
    for i in range(3000):
        text.append(last + i % 3)
        search.find(text)
        deltas.add(text)
    assert max(lengths) < 200 and sum(lengths) / 3000 < 300
