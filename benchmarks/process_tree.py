"""CPU and memory of a process and of all it started, read from /proc while it runs."""

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
    """What was used while it was asked."""

    hub_cpu_s: float
    """Of the process itself, from the first look at which `is_asked` held to the last."""
    hub_mb: float
    """Its peak."""
    all_mb: float
    """The peak of the sum over all processes, memory that they share counted once."""


def watch(process: "subprocess.Popen[bytes]", *, is_asked: Callable[[], bool]) -> Usage:
    """Look until the process ends."""
    cpu: list[float] = []
    hub_mb = all_mb = 0.0
    while process.poll() is None:
        with suppress(OSError):
            if is_asked():
                cpu.append(_cpu_s(process.pid))
            hub_mb = max(hub_mb, _field_mb(process.pid, "VmHWM"))
            all_mb = max(all_mb, sum(map(_pss_mb, _tree(process.pid))))
        time.sleep(POLL_S)
    return Usage(hub_cpu_s=cpu[-1] - cpu[0] if cpu else 0.0, hub_mb=hub_mb, all_mb=all_mb)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _field_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


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
