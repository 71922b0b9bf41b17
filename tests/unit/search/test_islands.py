"""Islands: dealt out in turn, migration along the ring, sizes and best ones kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import ConfigError
from rookery.search.islands import (
    Islands,
    IslandsConfig,
    Migration,
    is_due,
    migrate,
    migrations,
    settle,
)

RING = IslandsConfig(num_islands=3, interval=2, num_migrants=1)
HOME = Islands(members=(("a", "b"), ("c", "d"), ("e", "f")))
SCORES = {"a": 0.9, "b": 0.1, "c": None, "d": 0.2, "e": 0.5, "f": 0.6}


def test_settling_deals_out_in_turn() -> None:
    assert settle("abcde", config=RING).members == (("a", "d"), ("b", "e"), ("c",))
    with pytest.raises(ConfigError, match="Lower num_islands"):
        settle("ab", config=RING)


def test_migration_is_due_every_interval() -> None:
    assert [g for g in range(7) if is_due(g, config=RING)] == [2, 4, 6]
    assert not is_due(2, config=IslandsConfig(num_islands=1, interval=2))
    assert migrate(HOME, SCORES, config=RING, generation=3) == HOME


def test_the_best_go_around_the_ring() -> None:
    assert migrations(HOME, SCORES, config=RING, generation=2) == (
        Migration(source=0, target=1, ids=("a",)),
        Migration(source=1, target=2, ids=("d",)),
        Migration(source=2, target=0, ids=("f",)),
    )
    after = migrate(HOME, SCORES, config=RING, generation=2)
    assert after.members == (("a", "f"), ("d", "a"), ("f", "d"))


def test_who_is_there_already_does_not_come_again() -> None:
    islands = Islands(members=(("a", "b"), ("a", "d"), ("e", "f")))
    moves = migrations(islands, SCORES, config=RING, generation=2)
    assert moves[0].ids == ("b",)


@given(
    scores=st.lists(st.none() | st.integers(0, 5).map(float), min_size=12, max_size=12),
    num_islands=st.integers(1, 4),
    num_migrants=st.integers(1, 5),
)
def test_sizes_and_best_ones_are_kept(
    scores: list[float | None], num_islands: int, num_migrants: int
) -> None:
    config = IslandsConfig(num_islands=num_islands, interval=1, num_migrants=num_migrants)
    by_id = {f"c{i}": score for i, score in enumerate(scores)}
    before = settle(list(by_id), config=config)
    after = migrate(before, by_id, config=config, generation=1)
    assert [len(m) for m in after.members] == [len(m) for m in before.members]
    for old, new in zip(before.members, after.members, strict=True):
        assert len(set(new)) == len(new)
        had, has = ([s for id in ids if (s := by_id[id]) is not None] for ids in (old, new))
        if had:
            assert max(has) >= max(had)
        assert not any(by_id[id] is None for id in set(new) - set(old))
