"""The passes in C and in torch: closed forms, and the same bits from both."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weights.made import SHAPES, made

from rookery.weights.merge import (
    Cross,
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    merge,
    merge_stack,
)
from rookery.weights.merge import children as children_module
from rookery.weights.merge.compiled import (
    Blend,
    Drop,
    Floats,
    Integers,
    PassRunner,
    Tensors,
    Trim,
    as_tensors,
    compile_passes,
    load_compiled,
)
from rookery.weights.merge.cross import Rows
from rookery.weights.stack import stack


class SharedTensors:
    """The engine of tensors on numpy's memory."""

    def limits(self, row: Floats, *, bounds: Integers, counts: Integers) -> Floats:
        found = Tensors().limits(torch.from_numpy(row), bounds=bounds, counts=counts)
        limits: Floats = found.numpy()
        return limits

    def blend(self, blend: Blend[Floats]) -> None:
        Tensors().blend(as_tensors(blend))


COMPILER = shutil.which("cc")
COMPILED = compile_passes(COMPILER) if COMPILER else None
ENGINES = [
    pytest.param(SharedTensors(), id="torch"),
    pytest.param(
        COMPILED,
        id="c",
        marks=pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    ),
]
each_engine = pytest.mark.parametrize("engine", ENGINES)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def drawn(rng: np.random.Generator, kind: str, size: int) -> Floats:
    values = rng.standard_normal(size).astype(np.float32)
    chosen: Floats = {
        "normal": values,
        "heavy": np.exp(4 * values) * np.sign(values),
        "huge": np.exp(10 * values) * np.sign(values),
        "equal": np.full_like(values, -0.5),
        "close": np.float32(1) + values * np.float32(1e-6),
        "sparse": values * (values > 1),
        "sorted": np.sort(values),
        "few": np.round(values),
        "tiny": values * np.float32(1e-40),
    }[kind].astype(np.float32)
    return chosen


KINDS = ["normal", "heavy", "huge", "equal", "close", "sparse", "sorted", "few", "tiny"]


def bounds_of(sizes: list[int], *, gap: int) -> tuple[Integers, int]:
    """Stretches with gaps between them, and the length of the row."""
    found, start = [], gap
    for size in sizes:
        found.append((start, start + size))
        start += size + gap
    return np.array(found, np.int64), start


@each_engine
@given(
    sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=3),
    fraction=st.floats(0, 1),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_limits_are_those_of_sorting(
    engine: PassRunner[Floats], sizes: list[int], fraction: float, kind: str, seed: int
) -> None:
    bounds, length = bounds_of(sizes, gap=seed % 5)
    row = drawn(np.random.default_rng(seed), kind, length)
    counts = np.array([int(fraction * size) for size in sizes], np.int64)
    found = engine.limits(row, bounds=bounds, counts=counts)
    for (begin, end), k, limit in zip(bounds, counts, found, strict=True):
        ordered = np.sort(np.abs(row[begin:end]))
        assert limit == (ordered[-k] if k else np.inf)


@each_engine
@pytest.mark.parametrize("kind", ["heavy", "close", "few"])
def test_limits_of_long_rows(engine: PassRunner[Floats], kind: str) -> None:
    """Longer than one block of byte counters, and not a multiple of any group."""
    row = drawn(np.random.default_rng(1), kind, 300_001)
    for k in (1, 90_000, 299_999):
        found = engine.limits(row, bounds=np.array([[0, row.size]]), counts=np.array([k]))
        assert found[0] == np.sort(np.abs(row))[-k]


@each_engine
def test_columns_of_very_different_size_do_not_fool_the_sample(engine: PassRunner[Floats]) -> None:
    values = np.random.default_rng(0).standard_normal((1024, 64)) * np.logspace(-4, 4, 64)
    row = values.astype(np.float32).flatten()
    for k in (10, 20_000, 45_000, 65_000):
        found = engine.limits(row, bounds=np.array([[0, row.size]]), counts=np.array([k]))
        assert found[0] == np.sort(np.abs(row))[-k]


def made_blend(
    seed: int, *, sizes: list[int], num_parents: int, kind: str, elects: bool, drops: bool
) -> Blend[Floats]:
    rng = np.random.default_rng(seed)
    bounds, length = bounds_of(sizes, gap=3)
    shape = (num_parents, len(sizes))
    entries = (
        Drop(
            [np.float32(1.5) * (rng.random(40_000) < 0.7) for _ in range(num_parents)],
            rng.integers(0, 100, shape),
        )
        if drops
        else Trim(list(np.abs(rng.standard_normal(shape)).astype(np.float32)))
    )
    weights = rng.random(num_parents)
    return Blend(
        rows=[drawn(rng, kind, length) for _ in range(num_parents)],
        bounds=bounds,
        entries=entries,
        weights=(weights / weights.sum()).astype(np.float32) if elects else None,
        out=np.full(length, 7, np.float32),
    )


def votes_of(blend: Blend[Floats], stretch: int) -> np.ndarray:
    """[parents, size] in float64, as the definition reads."""
    begin, end = blend.bounds[stretch]
    found = []
    for parent, row in enumerate(blend.rows):
        values = row[begin:end].astype(np.float64)
        if isinstance(blend.entries, Trim):
            values[np.abs(values) < blend.entries.limits[parent][stretch]] = 0
        else:
            start = blend.entries.starts[parent, stretch]
            values *= blend.entries.tables[parent][start : start + end - begin]
        found.append(values)
    return np.array(found)


@each_engine
@pytest.mark.parametrize("num_parents", [1, 3, 8, 9])
@pytest.mark.parametrize(("elects", "drops"), [(True, False), (True, True), (False, True)])
def test_a_pass_is_its_closed_form(
    engine: PassRunner[Floats], num_parents: int, elects: bool, drops: bool
) -> None:
    blend = made_blend(
        5, sizes=[33_000, 17], num_parents=num_parents, kind="normal", elects=elects, drops=drops
    )
    engine.blend(blend)
    touched = np.zeros(blend.out.size, bool)
    for stretch, (begin, end) in enumerate(blend.bounds):
        votes = votes_of(blend, stretch)
        expected = votes.sum(0)
        if blend.weights is not None:
            weights = blend.weights[:, None] * np.ones_like(votes)
            total = (votes * weights).sum(0)
            weights[votes * total <= 0] = 0
            expected = (votes * weights).sum(0) / np.maximum(weights.sum(0), 1e-12)
        assert np.allclose(blend.out[begin:end], expected, rtol=2e-5, atol=2e-6)
        touched[begin:end] = True
    assert (blend.out[~touched] == 7).all()


@needs_compiler
@given(
    sizes=st.lists(st.integers(1, 35_000), min_size=1, max_size=3),
    num_parents=st.integers(1, 9),
    kind=st.sampled_from([kind for kind in KINDS if kind != "huge"]),
    elects=st.booleans(),
    drops=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_engines_give_the_same_bits(
    sizes: list[int], num_parents: int, kind: str, elects: bool, drops: bool, seed: int
) -> None:
    assert COMPILED
    results = []
    for engine in (SharedTensors(), COMPILED):
        blend = made_blend(
            seed,
            sizes=sizes,
            num_parents=num_parents,
            kind=kind,
            elects=elects or not drops,
            drops=drops,
        )
        engine.blend(blend)
        results.append(blend.out.view(np.int32))
    assert np.array_equal(results[0], results[1])


@each_engine
def test_opposite_votes_of_equal_weight_elect_nothing(engine: PassRunner[Floats]) -> None:
    row = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    blend = Blend(
        rows=[row, -row],
        bounds=np.array([[0, 100]]),
        entries=Trim([np.zeros(1, np.float32)] * 2),
        weights=np.array([0.5, 0.5], np.float32),
        out=np.ones(100, np.float32),
    )
    engine.blend(blend)
    assert not blend.out.view(np.int32).any()


def test_without_a_compiler_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    load_compiled.cache_clear()
    assert load_compiled() is None
    load_compiled.cache_clear()


def test_a_compiler_that_fails_is_told_and_torch_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    load_compiled.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_compiled() is None
    assert "did not compile entries.c" in caplog.text
    load_compiled.cache_clear()


@pytest.mark.parametrize(
    ("method", "space"), [(DareTiesConfig(), "delta"), (TiesConfig(), "factor")]
)
def test_children_made_of_tensors_have_the_same_bits(
    method: MergeConfig, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [made(1), made(2)]
    wanted = method.model_copy(update={"space": space})
    children = []
    for is_torch in (False, True):
        if is_torch:
            monkeypatch.setattr("rookery.weights.merge.methods.open_rows", open_tensors)
        children.append(merge(parents, weights=(0.4, 0.6), method=wanted, key=(3,)))
    assert len({child.version for child in children}) == 1


@pytest.mark.parametrize("method", [TiesConfig(), DareConfig()])
def test_matrices_that_are_cut_together_are_those_that_are_cut_alone(
    method: MergeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = stack([made(1), made(2), made(3)])
    crosses = [
        Cross(parents=parents, weights=(0.4, 0.6, 0.5)[: len(parents)], key=(i,))
        for i, parents in enumerate([(0, 1), (1, 2), (0, 1, 2), (0, 2)])
    ]
    alone = merge_stack(population, crosses=crosses, method=method)
    monkeypatch.setattr(children_module, "computes_on_gpu", lambda _: True)
    together = merge_stack(population, crosses=crosses, method=method)
    for layer in SHAPES:
        one, other = (s.b(layer) @ s.a(layer) for s in (alone, together))
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def open_tensors(rows: Rows, out: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    return Tensors(), rows.data, out


@pytest.mark.parametrize("space", ["delta", "factor"])
@pytest.mark.parametrize(
    "method",
    [LinearConfig(), LayerwiseConfig(), TiesConfig(), DareConfig()],
    ids=lambda method: method.type,
)
def test_children_are_made_where_their_parents_are(method: MergeConfig, space: str) -> None:
    """On a device without numbers, which no tensor of another device may meet."""
    parents = stack([made(1), made(2)]).to("meta")
    crosses = [Cross(parents=(0, 1), weights=(0.4, 0.6), key=(0,))]
    wanted = method.model_copy(update={"space": space})
    children = merge_stack(parents, crosses=crosses, method=wanted, rank=2)
    assert children.data.device.type == "meta" and children.layout.rank == 2
