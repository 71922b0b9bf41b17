"""What a process and all its descendants use together, from /proc. Linux only."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "data_bytes", "descendants", "measure", "measure_pss"]

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
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
    return found


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
