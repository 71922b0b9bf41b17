"""sandlock: Landlock and seccomp. Needs no namespaces, but Linux 6.12 and `pip install sandlock`.

A program of its own (`sandlock_launcher.py`) holds the jail: sandlock answers system calls in the
process that started it, which must not be an event loop.
"""

import importlib.util
import json
import platform
import sys
from pathlib import Path

from rookery.errors import SandboxError
from rookery.sandbox.backends.jail import (
    Jail,
    box_aliases,
    environment,
    python_folders,
    readable_paths,
    server_command,
)
from rookery.sandbox.box import Box
from rookery.sandbox.config import SandboxConfig
from rookery.sandbox.inside.isolation import MACHINES, OWN_PROCESSES

__all__ = ["sandlock_jail"]

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_PROC = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version")
"""Of /proc nothing about processes: sandlock opens its files in the name of the user, so that one
would show the memory of another. The server gets what it needs from outside."""
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_ETC_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SERVER_PROCESSES = 2 + OWN_PROCESSES
"""The server, one more while it tries something, and the candidate's that are ours."""


def sandlock_jail(config: SandboxConfig, box: Box) -> Jail:
    """The launcher's command line: a policy, then the server's command."""
    if importlib.util.find_spec("sandlock") is None:
        raise SandboxError("The package sandlock is not installed.")
    if platform.machine() not in MACHINES:
        raise SandboxError(
            f"sandlock does not keep a program from changing modes and times of files, and on "
            f"{platform.machine()} nothing else does: install bubblewrap."
        )
    readable = [
        *_SYSTEM,
        *(f"/proc/{name}" for name in _PROC),
        *_ETC,
        *(_ETC_NETWORK if config.network else ()),
        *_DEVICES,
    ]
    readable += [str(path) for path in (*python_folders(), *readable_paths(config), box.inside)]
    writable = [box.scratch, Path("/dev/null"), *config.devices]
    policy = {
        "fs_readable": [path for path in readable if Path(path).exists()],
        "fs_writable": [str(path) for path in writable],
        "max_processes": config.max_processes + _SERVER_PROCESSES,
        "net_allow": ["*:*"] if config.network else [],
        "cwd": str(box.scratch),
    }
    launcher = Path(__file__).with_name("sandlock_launcher.py")
    command = [sys.executable, "-s", "-P", str(launcher), json.dumps(policy)]
    command += server_command(
        config, box, inside=box.inside, scratch=box.scratch, isolation="landlock"
    )
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )
