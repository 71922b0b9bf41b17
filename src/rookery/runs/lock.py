"""The lock of a run: one process owns it, and the kernel frees it when that process ends.

    lock = RunLock.acquire(run / "run.lock")     # RunError names the owner when there is one
    lock.check()                                 # before every write: still ours?
    lock.release()

Nothing stays locked after `kill -9`. The text in the file only names the owner; text left by a dead
process is overwritten. The file itself is never removed.
"""

import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary
from rookery.runtime.file_lock import FileLock
from rookery.runtime.guard import process_start

__all__ = ["Owner", "RunLock", "is_locked", "read_owner", "require_free"]

LOOK_S = 0.2
"""A reader that asks whether a run is locked holds the lock for microseconds: try again."""

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
        return not _is_alive(self.pid) or process_start(self.pid) != self.process_start


class RunLock:
    """The held lock. Forked children do not inherit it; they must not write to the run."""

    def __init__(self, lock: FileLock) -> None:
        self.lock = lock

    @classmethod
    def acquire(cls, path: Path) -> "RunLock":
        """Take the lock or raise a RunError that names the owner."""
        with disk_boundary(f"Opening {path}"):
            lock = FileLock(path, mode=0o644)
        try:
            if not _take(lock, limit_s=LOOK_S):
                raise RunError(_refusal(path))
            left = read_owner(path)
            if left is not None:
                logger.info("%s: process %d ended without closing it", path.parent, left.pid)
            with disk_boundary(f"Writing {path}"):
                _write_owner(lock.descriptor)
        except BaseException:  # Ctrl-C too: an open file would keep the lock
            lock.close()
            raise
        return cls(lock)

    def check(self) -> None:
        """Raise a RunError unless this process still holds the lock that others would see."""
        path = self.lock.path
        if self.lock.descriptor < 0:
            raise RunError(
                f"This process does not own the run {path.parent}: it was closed, or this is "
                "a forked child. Write from the process that opened it, before it is closed."
            )
        if not self.lock.is_current:
            raise RunError(
                f"{path} was removed or replaced while the run was in use, so another "
                "process may own it now. Leave the file alone; resume the run to go on."
            )

    def release(self) -> None:
        """Free the lock; a second call does nothing."""
        if self.lock.descriptor >= 0:
            with self.lock:
                os.ftruncate(self.lock.descriptor, 0)


def is_locked(path: Path) -> bool:
    """Whether a process, here or on another host, holds the lock."""
    try:
        with FileLock(path, flags=os.O_RDONLY) as lock:
            return not _take(lock, is_shared=True)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


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


def _take(lock: FileLock, *, is_shared: bool = False, limit_s: float = 0.0) -> bool:
    try:
        return lock.take(is_shared=is_shared, limit_s=limit_s)
    except OSError as error:
        raise RunError(
            f"{lock.path} cannot be locked ({error.strerror}): its file system has no locks. "
            "Put runs on a local disk."
        ) from error


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
        process_start=process_start(pid),
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
