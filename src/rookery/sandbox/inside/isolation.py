"""What separates a candidate from the server that forked it: namespaces, Landlock, capabilities.

`enter_namespaces` gives a candidate its own users, processes, mounts and shared memory; where they
are not to be had (`confine_signals`), Landlock keeps it from signalling or tracing the server.
"""

import ctypes
import os
import sys

__all__ = [
    "become_subreaper",
    "can_nest",
    "confine_signals",
    "die_with_parent",
    "drop_capabilities",
    "drop_root",
    "enter_namespaces",
    "mount_private",
]

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
_NOSUID_NODEV, _NOEXEC = 2 | 4, 8
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38
_SIGKILL = 9
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same numbers on every architecture
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_FILES = 100_000
"""Files in a scratch folder: their names and nodes take memory that its size does not count."""
NOBODY = 65534


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def die_with_parent() -> None:
    """Linux only; elsewhere the server's end of stream has to do."""
    if sys.platform == "linux":
        _check(_LIBC.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Adopt every orphan among the descendants, so that none of them can be lost. Linux only."""
    if sys.platform == "linux":
        _check(_LIBC.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")


def drop_root() -> None:
    """Continue as nobody. Files of /proc belong to root of the host in every namespace, and the
    limit on processes never holds for root: a jail must not run as root.

    /proc is mounted afresh before, because a candidate may mount its own only where an unmasked
    one is to be seen.
    """
    _mount(b"proc", b"/proc", _NOSUID_NODEV | _NOEXEC, None)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Changing the user made /proc/self unwritable for this process: a candidate maps users there.
    _check(_LIBC.prctl(_DUMPABLE, 1, 0, 0, 0), "prctl")


def can_nest(scratch: str) -> bool:
    """Whether a process in here can have its own namespaces, tried by a child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter_namespaces()
            inner = os.fork()
            if inner == 0:
                mount_private(scratch, 1 << 20)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def enter_namespaces() -> None:
    """New user, process, mount and shared-memory namespaces; children enter the process one."""
    user, group = os.getuid(), os.getgid()
    _check(_LIBC.unshare(_NEWUSER | _NEWPID | _NEWNS | _NEWIPC), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_private(scratch: str, scratch_bytes: int) -> None:
    """A fresh scratch folder, /dev/shm and /proc, and no user namespaces below this one."""
    options = f"size={scratch_bytes},nr_inodes={_MAX_FILES},mode=1777".encode()
    _mount(b"tmpfs", scratch.encode(), _NOSUID_NODEV, options)
    _mount(b"tmpfs", b"/dev/shm", _NOSUID_NODEV, options)
    _mount(b"proc", b"/proc", _NOSUID_NODEV | _NOEXEC, None)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def drop_capabilities() -> None:
    """Give up every capability, for good: no program that is started regains one."""
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def confine_signals() -> bool:
    """Confine signals and tracing to this process and its children; False if Landlock cannot."""
    rules = _Ruleset(0, 0, _SCOPE_SIGNAL | _SCOPE_ABSTRACT_SOCKET)
    ruleset = _LIBC.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_confined = bool(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    os.close(ruleset)
    return is_confined


def _mount(kind: bytes, target: bytes, flags: int, options: bytes | None) -> None:
    _check(_LIBC.mount(kind, target, kind, flags, options), f"mount {target.decode()}")


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
