"""What tokens were drawn from, as a compact record."""

from hypothesis import given
from hypothesis import strategies as st

from rookery.types import KeptTokens

ROWS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple), max_size=6)


@given(ROWS)
def test_rows_come_back_as_they_were(rows: list[tuple[int, ...]]) -> None:
    kept = KeptTokens.of(rows)
    assert list(kept) == rows and len(kept) == len(rows)
    assert [tuple(row) for row in kept.rows] == rows
    assert [kept[place] for place in range(len(rows))] == rows
    assert list(kept[1:]) == rows[1:]
    assert kept == KeptTokens.of(kept) and hash(kept) == hash(KeptTokens.of(rows))
    assert len(kept.data) == 4 * sum(map(len, rows))


def test_by_hand() -> None:
    kept = KeptTokens.of([(5, 9), (), (7,)])
    assert kept.ends == (2, 2, 3)
    assert not KeptTokens.of([])
