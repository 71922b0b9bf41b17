"""bubblewrap: a jail of namespaces in which only what is bound exists.

As a normal user the jail has a user namespace. As root it has none: bubblewrap mounts with root's
rights (Python may lie in root's home), and the server continues as nobody before it imports
anything (`inside/isolation.py`, `drop_root`).
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rookery.errors import SandboxError
from rookery.sandbox.backends.jail import (
    Jail,
    environment,
    python_folders,
    readable_paths,
    server_command,
)
from rookery.sandbox.box import Box
from rookery.sandbox.config import SandboxConfig

__all__ = ["bubblewrap_jail"]

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime")
_ETC_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "ssl", "ca-certificates", "pki")
_INSIDE = Path("/rookery")
_USER = "1000"


def bubblewrap_jail(config: SandboxConfig, box: Box) -> Jail:
    """The command line of `bwrap`."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("The program bwrap is not installed.")
    shown = [*python_folders(), *readable_paths(config)]
    # A candidate's own /tmp would hide what is bound below it.
    scratch = Path("/scratch" if any(p.is_relative_to("/tmp") for p in shown) else "/tmp")
    command = [program, *_namespaces(config), *_system(config)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # A shared mapping of /dev/zero is memory that nobody counts. /dev/full reads the same.
    command += ["--dev-bind", "/dev/full", "/dev/zero"]
    for device in config.devices:
        command += ["--dev-bind", str(device), str(device)]
    for place in ("/dev/shm", "/tmp", str(scratch)):
        command += ["--size", str(config.scratch_bytes), "--perms", "1777", "--tmpfs", place]
    for path in shown:
        command += _bind(path)
    command += ["--ro-bind", str(box.inside), str(_INSIDE)]
    if scratch != Path("/tmp"):
        command += ["--remount-ro", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(scratch), "--"]
    command += server_command(config, box, inside=_INSIDE, scratch=scratch, isolation="namespaces")
    return Jail(command=command, environment=environment(config, scratch))


def _namespaces(config: SandboxConfig) -> Iterator[str]:
    yield from ("--die-with-parent", "--new-session", "--cap-drop", "ALL")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
    if not config.network:
        yield "--unshare-net"
    if os.geteuid() == 0:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"):
            yield from ("--cap-add", capability)
    else:
        yield from ("--unshare-user", "--uid", _USER, "--gid", _USER)


def _system(config: SandboxConfig) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _SYSTEM:
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)
    # Else bwrap makes it for root alone, and the server continues as nobody.
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in (*_ETC, *(_ETC_NETWORK if config.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _bind(path: Path) -> Iterator[str]:
    """Bind a path under its own name. bwrap gives the folders above it the rights that they have
    outside, and those of a home may shut out the user inside."""
    for parent in [*path.parents][-2::-1]:
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", str(path), str(path))
