"""Holds one jail of sandlock: `sandlock_launcher.py POLICY COMMAND...`, run as a program.

It lives as long as the command, and leaves none of the command's processes behind.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

__all__ = ["main"]

_PDEATHSIG, _SUBREAPER = 1, 36


def main(policy: str, command: list[str]) -> None:
    """Run the command in the jail with this process's standard descriptors; then kill the rest."""
    from sandlock import Sandbox

    libc = ctypes.CDLL(None)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    process = Sandbox(**json.loads(policy)).popen(command)
    os.close(0)  # the server alone holds the socket: its end is seen at once
    process.wait()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        os.waitpid(-1, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
