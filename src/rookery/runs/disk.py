"""Durable files, and the lock of a run.

    write_file(run / "report.json", data, scratch=run / ".tmp")

A file is written under a scratch name, forced to disk and renamed into place; then the folder is
forced to disk. The next start removes files that a crash left in the scratch folder.

    lock = RunLock.acquire(run / "run.lock")     # RunError names the owner if there is one
    lock.check()                                 # before every write: still ours?
    lock.release()

Nothing stays locked after `kill -9`. The text in the file only names the owner; text left by a dead
process is overwritten. The file itself is never removed.
"""

import ctypes
import errno
import json
import logging
import math
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rookery.errors import RunError
from rookery.runtime.file_lock import FileLock
from rookery.runtime.guard import process_start

__all__ = [
    "LockOwner",
    "RunLock",
    "canonical",
    "decode",
    "disk_boundary",
    "encode",
    "exchange",
    "is_locked",
    "is_utf8",
    "new_scratch",
    "read_owner",
    "recover_folders",
    "replace_folder",
    "require_free",
    "sweep",
    "sync_file",
    "sync_folder",
    "sync_tree",
    "write_file",
]


REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space, then resume. Nothing already stored is lost",
    errno.EDQUOT: "the disk quota is used up: free some space, then resume. Nothing stored is lost",
    errno.EFBIG: "the file would be too large: raise the limit (`ulimit -f unlimited`) and resume",
    errno.EACCES: "permission denied: choose a folder you may write to, or change its permissions",
    errno.EPERM: "not permitted: choose a folder you may write to, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EMFILE: "too many open files: raise the limit (`ulimit -n 65536`) and resume",
    errno.EIO: "the disk reports an error: check it, and go on from a copy on another disk",
}


@contextmanager
def disk_boundary(what: str) -> Iterator[None]:
    """Turn an OSError into a RunError with a remedy."""
    try:
        yield
    except OSError as cause:
        detail = REMEDIES.get(cause.errno or 0) or cause.strerror or str(cause)
        raise RunError(f"{what}: {detail}.") from cause


def write_file(path: Path, data: bytes, *, scratch: Path) -> None:
    """Write `data` to `path`: a reader sees the old file or the new one, never a part."""
    temporary = new_scratch(scratch)
    with disk_boundary(f"Writing {path}"):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C too: no half file is left
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def new_scratch(scratch: Path) -> Path:
    """Return an unused path in the scratch folder, which is made if missing."""
    with disk_boundary(f"Making {scratch}"):
        scratch.mkdir(parents=True, exist_ok=True)
    return scratch / secrets.token_hex(12)


def sweep(scratch: Path) -> None:
    """Remove half-written files of a killed process."""
    with disk_boundary(f"Clearing {scratch}"), suppress(FileNotFoundError):
        shutil.rmtree(scratch)


def sync_file(path: Path) -> None:
    """Force the content of a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk: otherwise a rename may not survive a power cut."""
    try:
        sync_file(path)
    except OSError as error:
        # Some network file systems cannot sync a folder, but keep names durable themselves.
        if error.errno != errno.EINVAL:
            raise


def sync_tree(path: Path) -> None:
    """Force a folder to disk with everything below it. Files with a second hard link are skipped:
    they were synced under their first name."""
    for parent, _, names in os.walk(path, topdown=False):
        for name in names:
            file = os.path.join(parent, name)
            if os.stat(file).st_nlink == 1:
                sync_file(Path(file))
        sync_folder(Path(parent))


# JSON text that every parser reads, and that reads back as the value written.
#
#     encode({"score": 0.5}, what="the report")     '{"score": 0.5}'
#     encode({"score": math.nan}, what="the report")
#     RunError: the report: ["score"] is nan; JSON has only finite numbers: write null, or say in
# ...
#
# Python's own encoder writes NaN and silently turns the key 1 into "1"; both are refused here.


PLAIN = frozenset({str, int, bool, type(None)})
"""Types that need no check: payloads are mostly these, and every append checks."""


def encode(value: object, *, what: str, indent: int | None = None) -> str:
    """Return JSON of dicts, lists, tuples (read as lists), text, numbers, booleans and None."""
    try:
        if problem := _problem(value):
            raise RunError(f"{what}: {problem[0] or 'it'} {problem[1]}.")
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    except RecursionError:
        raise RunError(f"{what}: it is nested too deeply or contains itself.") from None
    except ValueError as error:
        raise RunError(f"{what}: {error}. Write the number as text.") from None
    # Half a surrogate pair, as in text decoded with "surrogateescape", has no UTF-8: escape it.
    return text if is_utf8(text) else json.dumps(value, allow_nan=False, indent=indent)


def decode(text: str | bytes, *, what: str) -> Any:
    """Return the value of a document. RunError says that `what` is damaged if it does not parse."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{what} is damaged ({error}): restore it from a copy, or start a new run."
        ) from error


def canonical(text: str) -> str:
    """Return one spelling per value: {"a": 1, "b": 2} equals {"b": 2, "a": 1}; 1 and 1.0 differ."""
    return json.dumps(json.loads(text), sort_keys=True)


def is_utf8(text: str) -> bool:
    """Whether every character can be stored: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem(value: object) -> tuple[str, str] | None:
    """Return what JSON cannot hold, and where: ('["scores"][3]', "is nan; ..."). None if valid."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                kind = type(key).__name__
                return "", f"has the key {key!r} ({kind}); keys are text: write str(key)"
            if type(item) not in PLAIN and (problem := _problem(item)):
                return f'["{key}"]{problem[0]}', problem[1]
    elif isinstance(value, list | tuple):
        if _is_plain(value):
            return None
        for index, item in enumerate(value):
            if type(item) not in PLAIN and (problem := _problem(item)):
                return f"[{index}]{problem[0]}", problem[1]
    elif isinstance(value, float):
        if not math.isfinite(value):
            remedy = "write null, or say in text why there is no number"
            return "", f"is {value}; JSON has only finite numbers: {remedy}"
    elif value is not None and not isinstance(value, str | int):
        return "", f"is {_type_name(value)}; {_remedy(value)}"
    return None


def _is_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all values are valid, by a fast check for long lists of numbers."""
    kinds = set(map(type, values))
    # A sum of floats is finite only if all of them are.
    return kinds <= PLAIN or (kinds == {float} and math.isfinite(sum(values)))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return "store bytes with blobs.put_bytes and write their digest"
    if isinstance(value, Mapping):
        return "write dict(...)"
    return (
        "allowed are dict, list, text, numbers, booleans and None: write float(...), list(...) or "
        "dataclasses.asdict(...)"
    )


# Replaces a folder as a whole: a reader sees the old one or the new one.
#
#     replace_folder(staged, run / "best", root=run, old=run / ".old")
#     recover_folders(run, old=run / ".old")      # at the start, after a crash
#
# Linux and macOS exchange two folders atomically. If the file system cannot, the old folder is
# first moved to `old`: its place is empty between two renames, and after a crash in between
# `recover_folders` restores the old folder.


SLASH = "+"
"""Replaces the slash of a nested folder's name in `old`; no name of a run's folder contains it."""
NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically. Return False if that is not supported."""
    call = _system_call()
    if call is None:
        return False
    if call(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _system_call() -> Callable[[bytes, bytes], int] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            swap = 2  # RENAME_SWAP
            return lambda one, other: int(libc.renamex_np(one, other, swap))
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        renameat2 = libc.renameat2
        return lambda one, other: int(renameat2(here, one, here, other, swap))
    except AttributeError:  # a C library without it
        return None


def replace_folder(staged: Path, target: Path, *, root: Path, old: Path) -> None:
    """Move `staged` to `target`, which is below `root`. The previous folder is removed, or is left
    at `staged` for the caller to remove."""
    target.parent.mkdir(parents=True, exist_ok=True)
    retired = old / SLASH.join(target.relative_to(root).parts)
    if not target.exists():
        os.rename(staged, target)
    elif not exchange(staged, target):
        old.mkdir(exist_ok=True)
        os.rename(target, retired)
        sync_folder(old)
        os.rename(staged, target)
    for folder in target.parents:
        sync_folder(folder)
        if folder == root:
            break
    shutil.rmtree(retired, ignore_errors=True)


def recover_folders(root: Path, *, old: Path) -> None:
    """Restore folders that a killed process had moved away but not yet replaced."""
    with disk_boundary(f"Recovering folders of {root}"):
        for retired in sorted(old.iterdir()) if old.is_dir() else ():
            target = root.joinpath(*retired.name.split(SLASH))
            if target.exists():
                shutil.rmtree(retired)
            else:
                os.rename(retired, target)
                sync_folder(target.parent)


LOOK_S = 0.2
"""Seconds to retry: a reader that checks the lock holds it for microseconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOwner:
    """The process that wrote the lock file: `LockOwner(pid=412, host="ada", ...)`."""

    pid: int
    host: str
    since: str
    """Time it took the lock: "2026-03-01T09:30:00+00:00"."""
    namespace: str
    """Process namespace of `pid` (containers have their own); "" if unknown."""
    process_start: str
    """Start time of the process in kernel ticks: it tells apart processes that reuse a pid."""

    @property
    def has_ended(self) -> bool:
        """True only if certain: same host and process namespace, but no such process."""
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
        """Raise a RunError unless this process holds the lock on the current file."""
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
        """Free the lock. Idempotent."""
        if self.lock.descriptor >= 0:
            with self.lock:
                os.ftruncate(self.lock.descriptor, 0)


def is_locked(path: Path) -> bool:
    """Whether a process, here or on another host, holds the lock."""
    try:
        with FileLock(path, flags=os.O_RDONLY | os.O_NONBLOCK) as lock:  # a FIFO blocks
            return not _take(lock, is_shared=True)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def require_free(path: Path) -> None:
    """Raise the RunError of `RunLock.acquire` if another process holds the lock; change nothing."""
    if is_locked(path):
        raise RunError(_refusal(path))


def read_owner(path: Path) -> LockOwner | None:
    """Return the owner in the lock file; None without one or while it is being written."""
    try:
        return LockOwner(**json.loads(path.read_text(encoding="utf-8")))
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


def _describe_self() -> LockOwner:
    pid = os.getpid()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return LockOwner(
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
