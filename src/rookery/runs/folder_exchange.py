"""Replacing a folder as a whole: whoever looks sees the old one or the new one.

    replace_folder(staged, run / "best", root=run, old=run / ".old")
    recover_folders(run, old=run / ".old")      # at the start, after a crash

Linux and macOS exchange two folders in one step. Where the file system cannot, the old folder is
moved to `old` first: the place is empty for the moment between two renames, and after a crash in
that moment `recover_folders` puts the old folder back.
"""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rookery.runs.disk import disk_boundary, sync_folder

__all__ = ["exchange", "recover_folders", "replace_folder"]

SLASH = "+"
"""Stands for the slash of a nested folder's name in `old`; no name of a run's folder has it."""
NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Give each of two paths what the other had, in one step. False where that is not possible."""
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
    """Put `staged` at `target`, which is below `root`. What was there is removed, or is left at
    `staged` for the caller to remove."""
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
    """Put folders back that a killed process had taken away and not yet replaced."""
    with disk_boundary(f"Recovering folders of {root}"):
        for retired in sorted(old.iterdir()) if old.is_dir() else ():
            target = root.joinpath(*retired.name.split(SLASH))
            if target.exists():
                shutil.rmtree(retired)
            else:
                os.rename(retired, target)
                sync_folder(target.parent)
