"""The metrics of a run: one JSON line per step in metrics.jsonl, for people and plotting tools.

    metrics = MetricsFile.open(run / "metrics.jsonl")
    metrics.log(3, {"loss/policy": 0.25, "reward/mean": 0.5})
    {"step": 3, "time_s": 1767225600.0, "loss/policy": 0.25, "reward/mean": 0.5}

Lines survive `kill -9` but are forced to disk only on close: a resume depends only on events. A
step logged again, as after a resume, replaces the values it names. NaN and infinities are valid
measurements, written as the texts "NaN", "Infinity" and "-Infinity".
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Self

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary

__all__ = ["MetricsFile", "MetricsRow", "read_metrics", "read_rows"]

METRIC = re.compile(r"[^/\s][^/]*(/[^/]+)+")
CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 24
"""Most bytes of a line: a longer one is damaged."""
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors from reading a line that no run wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """The metrics of one step: `MetricsRow(step=3, time_s=..., values={"loss/kl": 0.1})`."""

    step: int
    time_s: float
    """Unix time of the last line of this step."""
    values: Mapping[str, float]


class MetricsFile:
    """The open metrics.jsonl of the process that owns the run."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for appending; removes a last line that a crash cut short."""
        with disk_boundary(f"Opening {path}"):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o644)
            try:
                _repair(descriptor)
            except BaseException:  # Ctrl-C too: nobody else could close it
                os.close(descriptor)
                raise
        return cls(path, descriptor)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line as a whole; if that fails, nothing is written and RunError is raised."""
        line = _encode(step, metrics)
        with self._mutex, disk_boundary(f"Writing {self._path}"):
            if self._descriptor < 0:
                raise RunError(f"{self._path} was closed: open the run again.")
            size_bytes = os.fstat(self._descriptor).st_size
            try:
                rest = line
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                os.ftruncate(self._descriptor, size_bytes)
                raise

    def close(self) -> None:
        """Force the lines to disk and close. Idempotent."""
        with self._mutex, disk_boundary(f"Closing {self._path}"):
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return one row per step, in order of step. Skips a last line that is still being written."""
    rows: dict[int, MetricsRow] = {}
    for row in read_rows(path)[0]:
        earlier = rows[row.step].values if row.step in rows else {}
        values = {**earlier, **row.values}
        rows[row.step] = MetricsRow(step=row.step, time_s=row.time_s, values=values)
    return [rows[step] for step in sorted(rows)]


def read_rows(
    path: Path, *, after_bytes: int = 0, most: int | None = None
) -> tuple[list[MetricsRow], int]:
    """Return up to `most` lines behind `after_bytes`, as written, and the offset behind them. A
    last line that is still being written is left for the next call."""
    rows: list[MetricsRow] = []
    with disk_boundary(f"Reading {path}"):
        if not path.exists():
            return rows, after_bytes
        with path.open("rb") as file:
            file.seek(after_bytes)
            while most is None or len(rows) < most:
                line = file.readline(LINE_BYTES)
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    break
                try:
                    rows.append(_decode(line))
                except DAMAGED as error:
                    what = f"{path}, line {_line_number(path, after_bytes)} is damaged"
                    raise RunError(f"{what} ({error}): remove it.") from error
                after_bytes += len(line)
    return rows, after_bytes


def _line_number(path: Path, offset_bytes: int) -> int:
    """Return the number of the line at an offset; 1 is the first."""
    with path.open("rb") as file:
        blocks = (min(CHUNK_BYTES, offset_bytes - at) for at in range(0, offset_bytes, CHUNK_BYTES))
        return sum(file.read(size).count(b"\n") for size in blocks) + 1


def _encode(step: int, metrics: Mapping[str, float]) -> bytes:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise RunError(f"Got the step {step!r}: a step is a whole number from 0 up.")
    line: dict[str, int | float | str] = {"step": step, "time_s": time.time()}
    for name, value in metrics.items():
        if not METRIC.fullmatch(name):
            raise RunError(f"Got the metric {name!r}: write area/name, such as 'loss/policy'.")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise RunError(
                f"The metric {name!r} is {type(value).__name__}; a metric is a number: write "
                "float(value)."
            )
        line[name] = _number(name, value)
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _number(name: str, value: Real) -> float | str:
    try:
        number = float(value)
    except OverflowError:
        raise RunError(
            f"The metric {name!r} is too large for a float: log its logarithm."
        ) from None
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")


def _decode(line: bytes) -> MetricsRow:
    document = json.loads(line)
    step, time_s = document.pop("step"), document.pop("time_s")
    values = {name: float(value) for name, value in document.items()}
    return MetricsRow(step=int(step), time_s=float(time_s), values=values)


def _repair(descriptor: int) -> None:
    """Cut the file behind its last whole line, which ends in a newline."""
    size_bytes = os.fstat(descriptor).st_size
    end = size_bytes
    while end > 0:
        start = max(0, end - CHUNK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size_bytes:
        os.ftruncate(descriptor, end)
