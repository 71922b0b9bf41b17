"""Isolates a candidate from the server that forked it, and a program from its evaluator.

`enter_namespaces` gives a candidate its own users, processes, mounts and shared memory. Without
namespaces, `confine_signals` uses Landlock to stop it from signalling or tracing the server.
`hide_memory` blocks /proc/PID/mem and similar files, `refuse_calls` blocks system calls.
"""

import ctypes
import errno
import itertools
import os
import platform
import struct
import sys
from collections.abc import Iterator

__all__ = [
    "MACHINES",
    "OWN_PROCESSES",
    "become_subreaper",
    "can_nest",
    "confine_signals",
    "die_with_parent",
    "drop_capabilities",
    "drop_root",
    "empty_folder",
    "enter_namespaces",
    "hide_memory",
    "mount_private",
    "refuse_calls",
]


_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
_NOSUID_NODEV, _NOEXEC = 2 | 4, 8
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38
_SIGKILL = 9
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same numbers on every architecture
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_FILES = 100_000
"""Limit on files in a scratch folder: names and inodes take memory that its size omits."""
NOBODY = 65534
OWN_PROCESSES = 4
"""The monitor, init, the evaluator, and the program's thread that accepts sockets."""

# System call numbers on (x86_64, aarch64); -1 where the architecture has no such call.
_MEMORY_CALLS = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
}
"""Calls that allocate memory outside any process's accounting or reach into other processes."""
_FILE_CALLS = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""Calls that change files anywhere in spite of Landlock."""
_MMAP, _IOCTL = (9, 222), (16, 29)
_SHARED_ANONYMOUS = 0x21
_SET_FLAGS = (0x40086602, 0x401C5820)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_X32 = 0x40000000


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        _check(_LIBC.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Adopt every orphaned descendant, so that none escapes reaping. Linux only."""
    if sys.platform == "linux":
        _check(_LIBC.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")


def drop_root() -> None:
    """Continue as user nobody: files of /proc belong to the host's root in every namespace, and the
    process limit never applies to root.

    First mount a fresh /proc: a candidate may mount its own only if an unmasked one is visible.
    """
    _mount(b"proc", b"/proc", _NOSUID_NODEV | _NOEXEC, None)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Changing the user made /proc/self unwritable, but candidates write their user maps there.
    _check(_LIBC.prctl(_DUMPABLE, 1, 0, 0, 0), "prctl")


def can_nest(scratch: str) -> bool:
    """Return whether a process in this jail can create nested namespaces; a child process tries."""
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
    """Create user, process, mount and IPC namespaces; only children enter the process namespace."""
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
    """Mount a fresh scratch folder, /dev/shm and /proc, and forbid further user namespaces."""
    options = f"size={scratch_bytes},nr_inodes={_MAX_FILES},mode=1777".encode()
    _mount(b"tmpfs", scratch.encode(), _NOSUID_NODEV, options)
    _mount(b"tmpfs", b"/dev/shm", _NOSUID_NODEV, options)
    _mount(b"proc", b"/proc", _NOSUID_NODEV | _NOEXEC, None)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def drop_capabilities() -> None:
    """Drop every capability irrevocably: a program started later cannot regain one."""
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def hide_memory(is_hidden: bool = True) -> None:
    """If `is_hidden`, this user's other processes cannot read or trace this one. Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(_DUMPABLE, int(not is_hidden), 0, 0, 0)


def refuse_calls(*, files: bool) -> bool:
    """Block system calls irrevocably: unaccounted memory and, with `files`, file changes that
    Landlock lets through. Return False on a machine that is not in MACHINES."""
    if platform.machine() not in MACHINES:
        return False
    lines = list(_filter_lines(*MACHINES[platform.machine()], files=files))
    data = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(data)
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(_LIBC.prctl(_SECCOMP, 2, program, 0, 0), "seccomp")
    return True


def _filter_lines(column: int, machine: int, *, files: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield BPF instructions as (operation, instructions to skip if true, if false, value)."""
    refuse = (_RETURN, 0, 0, _REFUSE)
    yield from ((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), refuse, (_LOAD, 0, 0, 0))
    if column == 0:
        yield from ((_AT_LEAST, 0, 1, _X32), refuse)
    for numbers in (_MEMORY_CALLS | (_FILE_CALLS if files else {})).values():
        if numbers[column] >= 0:
            yield from ((_EQUAL, 0, 1, numbers[column]), refuse)
    # The flags of mmap are its fourth argument, the request of ioctl is its second.
    yield from ((_EQUAL, 0, 5, _MMAP[column]), (_LOAD, 0, 0, 40), (_AND, 0, 0, _SHARED_ANONYMOUS))
    yield from ((_EQUAL, 0, 1, _SHARED_ANONYMOUS), refuse, (_RETURN, 0, 0, _ALLOW))
    if files:
        yield from ((_EQUAL, 0, 4, _IOCTL[column]), (_LOAD, 0, 0, 24))
        yield from ((_EQUAL, 1, 0, _SET_FLAGS[0]), (_EQUAL, 0, 1, _SET_FLAGS[1]), refuse)
    yield (_RETURN, 0, 0, _ALLOW)


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


def empty_folder(folder: str) -> None:
    """Remove everything in a folder, including folders without permissions, at any depth.

    Subfolders are moved up before they are emptied, so no path goes more than two names below
    `folder` and nothing recurses. Links are removed, not followed.
    """
    os.chmod(folder, 0o700)
    names = map(str, itertools.count())
    waiting = [os.path.join(folder, name) for name in _remove_files(folder)]
    while waiting:
        place = waiting.pop()
        for name in _remove_files(place):
            free = next(p for n in names if not os.path.lexists(p := os.path.join(folder, n)))
            os.rename(os.path.join(place, name), free)
            waiting.append(free)
        os.rmdir(place)


def _remove_files(folder: str) -> list[str]:
    """Remove the files of a folder; return its subfolders' names, made readable and movable."""
    left = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            left.append(name)
        else:
            os.unlink(path)
    return left
