"""A lock on a file. The kernel releases it when its process ends for any reason.

    with FileLock(path) as lock:          # opens or makes the file
        lock.wait()                       # or: if lock.take(): ...

Remove a lock's file only while holding the lock, or never. Otherwise two processes could each hold
a lock on different files of one path.
"""

import fcntl
import os
import time
import weakref
from pathlib import Path

__all__ = ["FileLock"]

_POLL_S = 0.005


class FileLock:
    """An open file and, once taken, the lock on it; `close` ends both. A forked child has neither,
    because its copy would keep the lock after the parent's death."""

    def __init__(
        self, path: Path, *, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o600
    ) -> None:
        self.path = path
        self.descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        """-1 after `close`, and in a forked child."""
        _OPEN.add(self)

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, *, is_shared: bool = False) -> None:
        """Wait until the lock is free, and take it."""
        fcntl.flock(self.descriptor, _kind(is_shared))

    def take(self, *, is_shared: bool = False, limit_s: float = 0.0) -> bool:
        """Take the lock; False if another process holds it for `limit_s`. A short limit outlasts
        processes that only look. Raises OSError if the file system has no locks."""
        end_s = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self.descriptor, _kind(is_shared) | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    return False
                time.sleep(_POLL_S)

    @property
    def is_current(self) -> bool:
        """Whether the path still names this file; False after it was removed or replaced."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, which releases the lock. Idempotent."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def _kind(is_shared: bool) -> int:
    return fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX


def _close_in_child() -> None:
    for lock in list(_OPEN):
        lock.close()


_OPEN: "weakref.WeakSet[FileLock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
