"""Runs a command in a sandlock jail: `sandlock_launcher.py POLICY COMMAND...`, run as a program.

It runs as long as the command. When the command ends or the launcher's parent dies, it kills all
remaining processes of the command.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]

_PDEATHSIG, _SUBREAPER = 1, 36
_POLL_S = 0.002


def main(policy: str, command: list[str]) -> None:
    """Run the command in the jail with this process's standard descriptors; then kill the rest."""
    from sandlock import Sandbox

    libc = ctypes.CDLL(None)
    # Not SIGKILL: processes in the jail would outlive this process.
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    has_ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: has_ended.set())
    process = Sandbox(**json.loads(policy)).popen(command)
    os.close(0)  # only the server holds the socket, so that its end is noticed at once

    def wait() -> None:
        process.wait()
        has_ended.set()

    # A thread, because a signal does not interrupt sandlock's wait.
    threading.Thread(target=wait, daemon=True).start()
    has_ended.wait()
    _end_descendants()
    os._exit(0)


def _end_descendants() -> None:
    """Kill and reap all processes of the jail; orphans are children of any thread of this process.

    `waitpid` decides when none is left, because /proc may omit children that are ending.
    """
    with suppress(ChildProcessError):  # none is left
        while True:
            for path in Path("/proc/self/task").glob("*/children"):
                for pid in _read(path):
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_POLL_S)  # sandlock's thread may reap the killed processes first


def _read(path: Path) -> list[str]:
    with suppress(OSError):  # the thread has ended
        return path.read_text().split()
    return []


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
