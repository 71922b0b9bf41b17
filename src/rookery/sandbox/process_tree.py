"""What a process and all its descendants use together, from /proc. Linux only."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = [
    "PipeReader",
    "Usage",
    "data_bytes",
    "descendants",
    "measure",
    "measure_pss",
]

# Reads what a candidate writes, up to a limit, on the event loop.


_CHUNK = 1 << 16


class PipeReader:
    """One pipe: hand `writer` to the candidate, close it here, then wait for `ended`.

    Keeps the first `max_bytes` (`keep_bytes=None`) or the last `keep_bytes`. Calls `on_line` with
    each of the first `max_lines` whole lines, and `on_excess` once, when more than `max_bytes` have
    come.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        on_excess: Callable[[], None],
        keep_bytes: int | None = None,
        on_line: Callable[[bytes], None] | None = None,
        max_lines: int = 0,
    ) -> None:
        self.ended = asyncio.Event()
        self.kept = bytearray()
        self.writer = -1
        self._reader = -1
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._keep_bytes = keep_bytes
        self._on_excess = on_excess
        self._on_line = on_line
        self._lines_left = max_lines
        self._line_start = 0

    def __enter__(self) -> Self:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writer()
        if self._reader >= 0:
            self._close_reader()

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1

    def _read(self) -> None:
        data = os.read(self._reader, _CHUNK)
        if not data:
            self._close_reader()
            return
        was_within = self._num_bytes <= self._max_bytes
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            if was_within:
                self._on_excess()
            if self._keep_bytes is None:
                return
        self.kept += data
        if self._keep_bytes is not None:
            del self.kept[: -self._keep_bytes]
        elif self._on_line is not None:
            self._split(self._on_line)

    def _split(self, on_line: Callable[[bytes], None]) -> None:
        while self._lines_left and (end := self.kept.find(b"\n", self._line_start)) >= 0:
            self._lines_left -= 1
            on_line(bytes(self.kept[self._line_start : end]))
            self._line_start = end + 1

    def _close_reader(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1
        self.ended.set()


_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident memory with shared pages counted once per process, threads, CPU seconds."""

    rss_bytes: int = 0
    num_threads: int = 0
    cpu_s: float = 0.0


def descendants(pid: int) -> list[int]:
    """The process first, then everything below it; what ends meanwhile may be missing."""
    pids = [pid]
    for each in pids:
        with suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                pids.extend(int(child) for child in (task / "children").read_text().split())
    return pids


def data_bytes(pid: int) -> int:
    """What a process has taken of what `RLIMIT_DATA` counts."""
    return int((_PROC / str(pid) / "statm").read_text().split()[5]) * _PAGE


def measure(pid: int) -> Usage:
    """The sum over the tree. CPU time holds that of processes that have ended and were reaped."""
    rss, threads, ticks = 0, 0, 0
    for each in descendants(pid):
        with suppress(OSError):
            data = (_PROC / str(each) / "stat").read_bytes()
            # The name in parentheses may hold any bytes; the fields follow its last parenthesis.
            fields = data.rpartition(b")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
            threads += int(fields[17])
            rss += int(fields[21]) * _PAGE
    return Usage(rss, threads, ticks / _TICKS)


def measure_pss(pid: int) -> int:
    """Resident memory of the tree with shared pages counted once. Slower than `measure`."""
    total = 0
    for each in descendants(pid):
        with suppress(OSError):
            for line in (_PROC / str(each) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
