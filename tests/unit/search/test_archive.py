"""The grid archive: one elite per cell, ties keep the holder, nothing outside the grid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.archive import (
    Archive,
    ArchiveConfig,
    FeatureConfig,
    Outcome,
    cell_of,
    extend,
    insert,
    sample,
)
from rookery.seeding import stream

GRID = ArchiveConfig(
    features=(
        FeatureConfig(name="length", low=0, high=100, bins=4),
        FeatureConfig(name="depth", low=-1, high=1, bins=2),
    )
)


def put(
    archive: Archive, id: str, score: float | None, length: float, depth: float = 0.5
) -> tuple[Archive, Outcome]:
    return insert(archive, id, score=score, features={"length": length, "depth": depth})


def test_a_cell_keeps_its_best() -> None:
    archive, outcome = put(Archive(config=GRID), "a", 0.5, 10)
    assert outcome == "new"
    archive, outcome = put(archive, "b", 0.5, 20)
    assert (outcome, archive.cells["0,1"].id) == ("rejected", "a")
    archive, outcome = put(archive, "c", 0.6, 20)
    assert (outcome, archive.cells["0,1"].id) == ("improved", "c")
    archive, outcome = put(archive, "d", -3.0, 90, -0.5)
    assert (outcome, archive.cells["3,0"].id) == ("new", "d")
    assert archive.best is not None and archive.best.id == "c"
    assert len(archive.cells) == 2
    assert archive.quality == pytest.approx(-2.4)


def test_inserting_does_not_change_the_archive_before() -> None:
    before, _ = put(Archive(config=GRID), "a", 0.5, 10)
    put(before, "b", 0.9, 10)
    put(before, "c", 0.9, 90)
    assert [entry.id for entry in before.cells.values()] == ["a"]


@pytest.mark.parametrize(
    ("length", "cell"),
    [(-50, 0), (0, 0), (24.9, 0), (25, 1), (99.9, 3), (100, 3), (1e308, 3), (-1e308, 0)],
)
def test_values_fall_into_bins(length: float, cell: int) -> None:
    assert cell_of(GRID, {"length": length, "depth": 0.0}) == f"{cell},1"


@given(
    st.lists(
        st.tuples(st.none() | st.integers(-3, 3).map(float), st.floats(-50, 150), st.floats(-2, 2))
    )
)
def test_against_a_search_through_everything(
    tried: list[tuple[float | None, float, float]],
) -> None:
    archive = Archive(config=GRID)
    everything: dict[str, list[tuple[float, str]]] = {}
    for index, (score, length, depth) in enumerate(tried):
        archive, _ = put(archive, str(index), score, length, depth)
        if score is not None:
            cell = cell_of(GRID, {"length": length, "depth": depth})
            everything.setdefault(cell, []).append((score, str(index)))
    best = {cell: max(rows, key=lambda row: row[0])[1] for cell, rows in everything.items()}
    assert {cell: entry.id for cell, entry in archive.cells.items()} == best


def test_samples_are_even_over_cells_and_independent_of_order() -> None:
    a, b = Archive(config=GRID), Archive(config=GRID)
    rows = [("a", 0.1, 10), ("b", 0.9, 30), ("c", 0.5, 60)]
    for row in rows:
        a, _ = put(a, *row)
    for row in reversed(rows):
        b, _ = put(b, *row)
    assert sample(a, count=2, rng=stream(3)) == sample(b, count=2, rng=stream(3))
    counts = [sample(a, count=1, rng=stream(i))[0] for i in range(600)]
    assert all(abs(counts.count(id) / 600 - 1 / 3) < 0.07 for id in "abc")
    assert sorted(sample(a, count=9, rng=stream(0))) == ["a", "b", "c"]
    assert sample(Archive(config=GRID), count=2, rng=stream(0)) == ()


def test_wrong_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="length"):
        insert(Archive(config=GRID), "a", score=1.0, features={"depth": 0.0})
    with pytest.raises(ValueError, match="finite number"):
        put(Archive(config=GRID), "a", 1.0, float("nan"))
    with pytest.raises(ValueError, match="or None"):
        put(Archive(config=GRID), "a", float("inf"), 1.0)
    with pytest.raises(ValueError, match="low is below high"):
        FeatureConfig(name="x", low=1, high=1)
    with pytest.raises(ValueError, match="twice"):
        ArchiveConfig(features=(FeatureConfig(name="x"), FeatureConfig(name="x")))
    assert Archive(config=GRID).best is None


def test_several_insertions_at_once_are_those_one_by_one() -> None:
    archive = Archive(config=ArchiveConfig(features=(FeatureConfig(name="x", bins=3),)))
    rows = [("a", 0.5, {"x": 0.1}), ("b", None, {"x": 0.9}), ("c", 0.7, {"x": 0.2})]
    rows += [("d", 0.6, {"x": 0.2}), ("e", 0.1, {"x": 0.9})]
    together, outcomes = extend(archive, rows)
    expected = []
    for id, score, features in rows:
        archive, outcome = insert(archive, id, score=score, features=features)
        expected.append(outcome)
    assert (together, outcomes) == (archive, expected)
    assert outcomes == ["new", "rejected", "improved", "rejected", "new"]
