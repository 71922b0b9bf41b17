"""The lock of a run: one process owns it, and the kernel frees it when that process ends.

    lock = RunLock.acquire(run / "run.lock")     # RunError names the owner when there is one
    lock.check()                                 # before every write: still ours?
    lock.release()

The lock is `flock` on the file, so nothing stays locked after `kill -9`. The text in the file only
names the owner; text left by a dead process is overwritten. The file itself is never removed, as
two processes could then each hold "the" lock on a different file.
"""

import fcntl
import json
import logging
import os
import socket
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary

__all__ = ["Owner", "RunLock", "is_locked", "read_owner", "require_free"]

ATTEMPTS = 40
"""A reader that asks whether a run is locked holds the lock for microseconds: try again."""
PAUSE_S = 0.005

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that wrote the lock file: `Owner(pid=412, host="ada", ...)`."""

    pid: int
    host: str
    since: str
    """When it took the lock: "2026-03-01T09:30:00+00:00"."""
    namespace: str
    """Which table of processes `pid` belongs to (containers have their own); "" if unknown."""
    process_start: str
    """Start time of the process in kernel ticks: tells it from a later one with the same pid."""

    @property
    def has_ended(self) -> bool:
        """True only when it is certain: same host, same process table, and no such process."""
        here = _describe_self()
        if (self.host, self.namespace) != (here.host, here.namespace):
            return False
        return not _is_alive(self.pid) or _process_start(self.pid) != self.process_start


class RunLock:
    """The held lock. Forked children do not inherit it; they must not write to the run."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> "RunLock":
        """Take the lock or raise a RunError that names the owner."""
        with disk_boundary(f"Opening {path}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _try_lock(path, descriptor, fcntl.LOCK_EX):
                raise RunError(_refusal(path))
            left = read_owner(path)
            if left is not None:
                logger.info("%s: process %d ended without closing it", path.parent, left.pid)
            with disk_boundary(f"Writing {path}"):
                _write_owner(descriptor)
        except BaseException:  # Ctrl-C too: an open descriptor would keep the lock
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def check(self) -> None:
        """Raise a RunError unless this process still holds the lock that others would see."""
        if self._descriptor < 0:
            raise RunError(
                f"This process does not own the run {self._path.parent}: it was closed, or this is "
                "a forked child. Write from the process that opened it, before it is closed."
            )
        try:
            seen = os.stat(self._path)
        except OSError:
            seen = None
        mine = os.fstat(self._descriptor)
        if seen is None or (seen.st_dev, seen.st_ino) != (mine.st_dev, mine.st_ino):
            raise RunError(
                f"{self._path} was removed or replaced while the run was in use, so another "
                "process may own it now. Leave the file alone; resume the run to go on."
            )

    def release(self) -> None:
        """Free the lock; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Close a forked child's copy, which would keep the lock after its parent has died."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(path: Path) -> bool:
    """Whether a process, here or on another host, holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise RunError(_unsupported(path, error)) from error
    finally:
        os.close(descriptor)
    return False


def require_free(path: Path) -> None:
    """Raise the RunError of `RunLock.acquire` when another process holds the lock; change nothing.

    For those who take the lock later, and need to know now.
    """
    if is_locked(path):
        raise RunError(_refusal(path))


def read_owner(path: Path) -> Owner | None:
    """Who wrote the lock file; None when nobody did or it is being written just now."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _try_lock(path: Path, descriptor: int, kind: int) -> bool:
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < ATTEMPTS:
                time.sleep(PAUSE_S)
        except OSError as error:
            raise RunError(_unsupported(path, error)) from error
    return False


def _write_owner(descriptor: int) -> None:
    text = json.dumps(asdict(_describe_self())) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _refusal(path: Path) -> str:
    owner = read_owner(path)
    if owner is None:
        return (
            f"The run {path.parent} is in use by another process. Wait for it to end, or stop it."
        )
    who = f"process {owner.pid} on {owner.host}, since {owner.since}"
    if owner.has_ended:
        return (
            f"The run {path.parent} was in use by {who}. It has ended, but a process that it "
            f"started still holds the lock: find it with `fuser {path}`, end it, and try again."
        )
    return (
        f"The run {path.parent} is in use by {who}. Wait for it to end, or stop it, and try again. "
        f"To look at it meanwhile: `rookery runs show {path.parent}`."
    )


def _unsupported(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be locked ({error.strerror}): its file system has no locks. "
        "Put runs on a local disk."
    )


def _describe_self() -> Owner:
    pid = os.getpid()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return Owner(
        pid=pid,
        host=socket.gethostname(),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        namespace=namespace,
        process_start=_process_start(pid),
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _process_start(pid: int) -> str:
    """Field 22 of /proc/PID/stat; "" for a process that has ended, and where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold spaces
    return "" if state in {"X", "Z"} else rest[18]


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
