"""Metrics: numbers come back exactly, a step logged again replaces, bad input is refused."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.runs import read_metrics
from rookery.runs.metrics import MetricsFile

names = st.sampled_from(["loss/policy", "reward/math 500/mean", "time/ü"])
lines = st.tuples(st.integers(0, 5), st.dictionaries(names, st.floats()))


@given(st.lists(lines | st.just("reopen"), max_size=15))
def test_rows_are_the_last_values_per_step(steps: list[tuple[int, dict[str, float]] | str]) -> None:
    model: dict[int, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        metrics = MetricsFile.open(path)
        for line in steps:
            if isinstance(line, str):
                metrics.close()
                metrics = MetricsFile.open(path)
                continue
            metrics.log(*line)
            model.setdefault(line[0], {}).update(line[1])
        metrics.close()
        rows = read_metrics(path)
        assert [row.step for row in rows] == sorted(model)
        # repr tells nan, -0.0 and inf apart, and nan equals nan.
        assert [repr(row.values) for row in rows] == [repr(model[step]) for step in sorted(model)]


def test_lines_are_json_for_every_parser(tmp_path: Path) -> None:
    metrics = MetricsFile.open(tmp_path / "m.jsonl")
    half: Any = np.float32(0.5)
    metrics.log(0, {"a/b": math.nan, "a/c": -math.inf, "a/d": half, "a/e": 3})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    del line["time_s"]
    assert line == {"step": 0, "a/b": "NaN", "a/c": "-Infinity", "a/d": 0.5, "a/e": 3.0}


@pytest.mark.parametrize(
    ("step", "values", "words"),
    [
        (-1, {}, "from 0 up"),
        (True, {}, "from 0 up"),
        (1.5, {}, "from 0 up"),
        (0, {"loss": 1.0}, "write area/name"),
        (0, {"/loss": 1.0}, "write area/name"),
        (0, {"a/b": "1"}, "float\\(value\\)"),
        (0, {"a/b": None}, "float\\(value\\)"),
        (0, {"a/b": True}, "float\\(value\\)"),
        (0, {"a/b": 10**400}, "too large"),
    ],
)
def test_bad_input_is_refused_and_not_written(
    tmp_path: Path, step: int, values: dict[str, float], words: str
) -> None:
    metrics = MetricsFile.open(tmp_path / "m.jsonl")
    with pytest.raises(RunError, match=words):
        metrics.log(step, values)
    metrics.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_damage_within_the_file_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1, "time_s": 0}\nxxx\n{"step": 2, "time_s": 0}\n')
    with pytest.raises(RunError, match="line 2 is damaged"):
        read_metrics(tmp_path / "m.jsonl")


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m.jsonl") == []
