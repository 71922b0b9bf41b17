"""Starts a server with a watcher that ends it when its owner dies.

    python guard.py OWNER_PID -m vllm.entrypoints.openai.api_server ...

The process starts a watcher, then replaces itself by the server. When the owner dies, the kernel
sends SIGTERM to the server. The watcher, outside the server's process group, kills the processes
that stay: a server that ignores signals while it loads, and engine processes whose server has died.
Needs Linux and Python alone.
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
"""Time for a server to stop by itself; vLLM needs two seconds."""
_POLL_S = 0.2
_PARENT_DEATH_SIGNAL = 1
_WATCH = "watch"
_TRACKER = b"multiprocessing.resource_tracker"


def process_start(pid: int) -> str:
    """Start time of a process in kernel ticks; "" if it is gone or a zombie."""
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
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_group(group: int) -> None:
    """Kill every process of a group except Python's resource trackers: these end by themselves
    after they have removed the shared memory of the others."""
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
        sys.exit(1)  # the owner died before prctl
    server = os.getpid()
    between = os.fork()
    if not between:
        # Reparented: a server ends its own children when it ends.
        if os.fork():
            os._exit(0)
        os.setsid()
        ids = [f"{pid}:{process_start(pid)}" for pid in (owner, server)]
        os.execv(sys.executable, [sys.executable, "-IS", __file__, _WATCH, *ids])
    os.waitpid(between, 0)
    os.execv(sys.executable, [sys.executable, *command])


def _watch(owner: str, server: str) -> None:
    """Wait until the owner or the server ends, then end the server's group."""
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
