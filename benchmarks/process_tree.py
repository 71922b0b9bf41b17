"""CPU and memory of a process and its descendants, read from /proc while it runs."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "watch"]

POLL_S = 0.25
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU and memory used."""

    cpu_s: tuple[tuple[int, float], ...]
    """Per reading: calls so far, and CPU seconds of the process itself."""
    hub_mb: float
    """Peak memory of the process itself."""
    all_mb: float
    """Peak of the sum over all processes, with shared memory counted once."""

    def cpu_ms(self, first: int, last: int) -> float:
        """CPU milliseconds per call between the readings from `first` to `last` calls."""
        looks = [(calls, cpu_s) for calls, cpu_s in self.cpu_s if first <= calls <= last]
        if len(looks) < 2 or looks[-1][0] == looks[0][0]:
            return float("nan")
        return 1000 * (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])


def watch(process: "subprocess.Popen[bytes]", *, num_calls: Callable[[], int]) -> Usage:
    """Read the usage repeatedly until the process ends."""
    cpu: list[tuple[int, float]] = []
    hub_mb = all_mb = 0.0
    while process.poll() is None:
        with suppress(OSError):
            cpu.append((num_calls(), _cpu_s(process.pid)))
            hub_mb = max(hub_mb, _field_mb(process.pid, "VmHWM"))
            all_mb = max(all_mb, sum(map(_pss_mb, _tree(process.pid))))
        time.sleep(POLL_S)
    return Usage(cpu_s=tuple(cpu), hub_mb=hub_mb, all_mb=all_mb)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _field_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = (int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
    return next(found, 0.0)  # a process that has ended has no such line


def _pss_mb(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _tree(pid: int) -> list[int]:
    """The process and its descendants."""
    found, left = [], [pid]
    while left:
        own = left.pop()
        found.append(own)
        with suppress(OSError):
            for thread in Path(f"/proc/{own}/task").iterdir():
                left += map(int, (thread / "children").read_text().split())
    return found
