"""Runs first in a process that is to be a server: leaves a watcher beside it, then becomes it.

    python guard.py OWNER_PID -m vllm.entrypoints.openai.api_server ...

The kernel asks the server to stop when its owner dies. The watcher, a process outside the server's
group, ends what that leaves: a server that does not listen while it loads, and engine processes
whose server died, which would keep their memory. Needs Linux, and nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

__all__ = ["STOP_S", "group_members", "kill_group", "process_start", "signal_group"]

STOP_S = 15.0
"""How long a server may take to stop by itself; vLLM needs two seconds."""
_POLL_S = 0.2
_PARENT_DEATH_SIGNAL = 1
_WATCH = "watch"
_TRACKER = b"multiprocessing.resource_tracker"


def process_start(pid: int) -> str:
    """When a process started, in kernel ticks; "" for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    after_name = fields.rpartition(")")[2].split()
    return "" if not after_name or after_name[0] in "ZX" else after_name[19]


def group_members(group: int) -> list[int]:
    """The living processes of a process group."""
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    pids = [int(name) for name in names if name.isdigit()]
    return [pid for pid in pids if _group(pid) == group and process_start(pid)]


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process and all it started; nothing when they are gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_group(group: int) -> None:
    """Force every process of a group to end, but Python's resource trackers: they end by
    themselves, after they have removed the shared memory that the others left."""
    if not os.path.isdir("/proc/self"):  # not Linux
        signal_group(group, signal.SIGKILL)
    for pid in group_members(group):
        with contextlib.suppress(OSError):  # gone meanwhile
            if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _become(owner: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)  # outlives exec
    if os.getppid() != owner:
        sys.exit(1)  # it died before the kernel was asked
    server = os.getpid()
    between = os.fork()
    if not between:
        # A child of nobody here: the server ends its own children when it ends.
        if os.fork():
            os._exit(0)
        os.setsid()
        ids = [f"{pid}:{process_start(pid)}" for pid in (owner, server)]
        os.execv(sys.executable, [sys.executable, "-IS", __file__, _WATCH, *ids])
    os.waitpid(between, 0)
    os.execv(sys.executable, [sys.executable, *command])


def _watch(owner: str, server: str) -> None:
    """Wait for the end of either, then end the server's group."""
    while all(process_start(int(pid)) == start for pid, start in (_ids(owner), _ids(server))):
        time.sleep(_POLL_S)
    group = int(_ids(server)[0])
    if group_members(group):
        signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kill_group(group)


def _ids(text: str) -> tuple[str, str]:
    pid, _, start = text.partition(":")
    return pid, start


if __name__ == "__main__":
    if sys.argv[1] == _WATCH:
        _watch(*sys.argv[2:])
    else:
        _become(int(sys.argv[1]), sys.argv[2:])
