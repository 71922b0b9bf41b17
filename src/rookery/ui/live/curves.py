"""The curves of a run: read as they are written, and thinned so that no extreme is lost.

curves = Curves(run / "metrics.jsonl")
curves.update()
curves.document(points=600)     {"revision": 0, "last": 99, "curves": {"loss/kl": [[0, 0.1], ..]}}
"""

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rookery.runs import read_rows

__all__ = ["Curves", "spark", "thin"]

Point = tuple[int, float | None]
SPARK_LINES = 48
"""Lines of a long file that a small drawing is made of."""
LINE_BYTES = 1 << 13
"""More than a line has."""
WHOLE_BYTES = 1 << 17
"""Files up to this size are read whole for a small drawing."""


class Curves:
    """All metrics of a run, each as two rows of numbers in the order of their step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self.revision = 0
        """Rises when a step was measured again, as after a resume: what was drawn is then wrong."""

    def update(self) -> None:
        """Take in what was written since the last call."""
        if self._path.exists() and self._path.stat().st_size < self._read_bytes:
            self._read_bytes, self._steps, self._values = 0, {}, {}
            self.revision += 1
        rows, self._read_bytes = read_rows(self._path, after_bytes=self._read_bytes)
        for row in rows:
            for name, value in row.values.items():
                self._put(name, row.step, value)

    def _put(self, name: str, step: int, value: float) -> None:
        steps = self._steps.setdefault(name, array("q"))
        values = self._values.setdefault(name, array("d"))
        if not steps or step > steps[-1]:
            steps.append(step)
            values.append(value)
            return
        self.revision += 1
        place = bisect_left(steps, step)
        if steps[place] == step:
            values[place] = value
        else:
            steps.insert(place, step)
            values.insert(place, value)

    def document(
        self, *, points: int, first: int = 0, last: int | None = None, names: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The curves between two steps, each of at most about so many points."""
        chosen = {}
        for name in sorted(names or self._steps):
            steps = self._steps.get(name)
            if steps is None:
                continue
            low = bisect_left(steps, first)
            high = len(steps) if last is None else bisect_left(steps, last + 1)
            thinned = thin(steps[low:high], self._values[name][low:high], points=points)
            if thinned:
                chosen[name] = thinned
        ends = [steps[-1] for steps in self._steps.values()]
        return {"revision": self.revision, "last": max(ends, default=-1), "curves": chosen}


def thin(steps: Sequence[int], values: Sequence[float], *, points: int) -> list[Point]:
    """Lowest and highest of each stretch, with both ends; a gap (None) where a number is no number.

    >>> thin(range(6), [0, 9, 1, 1, -5, 2], points=4)
    [(0, 0), (1, 9), (4, -5), (5, 2)]
    """
    if len(steps) <= points:
        return [(s, _finite(v)) for s, v in zip(steps, values, strict=True)]
    num, chosen = max(1, points // 2), {0, len(steps) - 1}
    for bucket in range(num):
        places = range(len(steps) * bucket // num, len(steps) * (bucket + 1) // num)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            chosen |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(places):
            chosen.add(next(p for p in places if not math.isfinite(values[p])))
    return [(steps[place], _finite(values[place])) for place in sorted(chosen)]


def spark(path: Path, prefixes: Sequence[str]) -> tuple[str, list[float]]:
    """The first metric that is there and begins so, in a few dozen numbers; a long file is read
    at evenly spaced lines only."""
    if not path.exists():
        return "", []
    rows = _sampled_rows(path)
    names = {name: None for row in rows for name in row}
    found = [name for prefix in prefixes for name in names if name.startswith(prefix)]
    name = next(iter(found), "")
    numbers = [float(row[name]) for row in rows if name in row]
    thinned = thin(range(len(numbers)), numbers, points=SPARK_LINES)
    return name, [value for _, value in thinned if value is not None]


def _sampled_rows(path: Path) -> list[dict[str, Any]]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if size_bytes <= WHOLE_BYTES:
            lines = file.read().split(b"\n")[:-1]
        else:
            lines = []
            for part in range(SPARK_LINES):
                file.seek((size_bytes - LINE_BYTES) * part // (SPARK_LINES - 1))
                if part:
                    file.readline()  # the rest of a line
                lines.append(file.readline())
            lines += file.read().split(b"\n")[-2:-1]  # the newest
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # `Curves` tells of the damage
    return [row for row in rows if isinstance(row, dict)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
