"""Durable files: whole or absent after a crash at any point, and full disks said in a sentence.

    write_file(run / "report.json", data, scratch=run / ".tmp")

A file is written under a scratch name, forced to disk, renamed over its place, and then the folder
is forced to disk. What a crash leaves in the scratch folder is removed at the start.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rookery.errors import RunError

__all__ = [
    "disk_boundary",
    "new_scratch",
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
    """Turn an OSError into a RunError that says what to do about it."""
    try:
        yield
    except OSError as cause:
        detail = REMEDIES.get(cause.errno or 0) or cause.strerror or str(cause)
        raise RunError(f"{what}: {detail}.") from cause


def write_file(path: Path, data: bytes, *, scratch: Path) -> None:
    """Put `data` at `path`: a reader sees the old file or the new one, and never a part."""
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
    """A path in the scratch folder that nobody else uses; the folder is made when missing."""
    with disk_boundary(f"Making {scratch}"):
        scratch.mkdir(parents=True, exist_ok=True)
    return scratch / secrets.token_hex(12)


def sweep(scratch: Path) -> None:
    """Remove what a process that was killed left half-written."""
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
    """Force the names in a folder to disk: without it a rename may not survive a power cut."""
    try:
        sync_file(path)
    except OSError as error:
        # Some network file systems cannot sync a folder and keep names durable by themselves.
        if error.errno != errno.EINVAL:
            raise


def sync_tree(path: Path) -> None:
    """Force a folder to disk with everything below it.

    Files with a further name elsewhere are left out: they were synced when they got their first.
    """
    for parent, _, names in os.walk(path, topdown=False):
        for name in names:
            file = os.path.join(parent, name)
            if os.stat(file).st_nlink == 1:
                sync_file(Path(file))
        sync_folder(Path(parent))
