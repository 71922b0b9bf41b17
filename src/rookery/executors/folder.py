"""A folder as one value to send to workers: a tar archive named by the hash of its content.

    package = pack_folder(Path("problem/"))
    with hold_folder(package.digest, lambda: package.content) as path:   # on the worker's machine
        ...

The same files give the same bytes, whatever their dates and owners. On each machine a package is
unpacked once, into a private folder of the user that all workers there share:

    /tmp/rookery-folders-1000/
        3fa9...c1.lock      locked (shared) by all users of the folder
        3fa9...c1/          the files

A lock ends with its process, so the next worker removes the folders of a killed one.
"""

import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from rookery.errors import ConfigError, ExecutorError, boundary
from rookery.runtime.file_lock import FileLock

__all__ = ["IGNORED", "MAX_FOLDER_BYTES", "FolderPackage", "hold_folder", "pack_folder"]

IGNORED = (".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "*.pyc", "node_modules")
"""Patterns of names that are not packed, at any depth."""
MAX_FOLDER_BYTES = 256 << 20
"""Most bytes of all files: the archive is held in memory and sent to every machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPackage:
    """A packed folder."""

    digest: str
    """SHA-256 of `content`."""
    content: bytes = field(repr=False)


def pack_folder(
    path: Path, *, ignored: Sequence[str] = IGNORED, left_out: Path | None = None
) -> FolderPackage:
    """Pack the current files of a folder; later changes do not reach the workers.

    `ignored` are patterns of names at any depth, `left_out` is one folder.
    """
    with boundary(ConfigError, f"Packing the folder {path} for workers", foreign=(OSError,)):
        files = _list_files(path, ignored, left_out)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, file in files:
                _add(archive, name, file)
    data = content.getvalue()
    return FolderPackage(digest=hashlib.sha256(data).hexdigest(), content=data)


def _list_files(
    path: Path, ignored: Sequence[str], left_out: Path | None
) -> list[tuple[str, Path]]:
    """Return sorted names, relative to the folder, with their files; refuse what cannot be sent."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder.")
    files: list[tuple[str, Path]] = []
    num_bytes = 0
    for folder, folders, names in os.walk(path):
        folders[:] = [
            name
            for name in folders
            if not _is_ignored(name, ignored) and Path(folder, name) != left_out
        ]
        for name in [*folders, *names]:
            file = Path(folder, name)
            if _is_ignored(name, ignored) or (file.is_dir() and not file.is_symlink()):
                continue
            num_bytes += _check_size(file)
            if num_bytes > MAX_FOLDER_BYTES:
                raise ConfigError(
                    f"The folder {path} has more than {MAX_FOLDER_BYTES >> 20} MiB of files and "
                    "would be sent to every worker. Put what the workers need into a folder of "
                    "its own."
                )
            files.append((file.relative_to(path).as_posix(), file))
    return sorted(files)


def _is_ignored(name: str, ignored: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in ignored)


def _check_size(file: Path) -> int:
    """Return the bytes of a regular file, or of the file that a link leads to."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a link to a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ConfigError(
            f"{file} is {kind} and cannot be sent to workers. Replace it by its files or move it."
        )
    return status.st_size


def _add(archive: tarfile.TarFile, name: str, file: Path) -> None:
    content = file.read_bytes()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644
    archive.addfile(entry, io.BytesIO(content))


@contextmanager
def hold_folder(
    digest: str, fetch: Callable[[], bytes], *, root: Path | None = None
) -> Iterator[Path]:
    """Yield the unpacked folder, kept for the block. `fetch` runs only if this machine lacks it."""
    root = root or Path(tempfile.gettempdir()) / f"rookery-folders-{os.getuid()}"
    with boundary(ExecutorError, f"Unpacking a folder for workers into {root}", foreign=(OSError,)):
        _make_private(root)
        _remove_unused(root)
        lock = _lock_shared(root / f"{digest}.lock")
    try:
        with boundary(ExecutorError, f"Unpacking a folder into {root}"):
            if not (root / digest).exists():
                _unpack(fetch(), digest, root)
        yield root / digest
    finally:
        lock.close()
        _remove_unused(root)


def _make_private(root: Path) -> None:
    """Make `root`, and refuse it if others own it: others may write to its parent."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ExecutorError(
            f"{root} is not a folder that only this user can write to. Remove it or set TMPDIR."
        )


def _lock_shared(path: Path) -> FileLock:
    """Lock the file at `path`, which may be removed while this waits for the lock."""
    while True:
        lock = FileLock(path, flags=os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        lock.wait(is_shared=True)
        if lock.is_current:
            return lock
        lock.close()


def _remove_unused(root: Path) -> None:
    """Remove the folders that no process holds."""
    for path in root.glob("*.lock"):
        with suppress(OSError), FileLock(path, flags=os.O_RDWR | os.O_NOFOLLOW) as lock:
            if lock.take():
                for folder in root.glob(f"{path.stem}*"):
                    if folder != path:
                        shutil.rmtree(folder, ignore_errors=True)
                path.unlink()


def _unpack(content: bytes, digest: str, root: Path) -> None:
    """Unpack all or nothing, beside the final place, then rename."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise ExecutorError(f"The folder received does not have the hash {digest}.")
    draft = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=root))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(draft, filter="data")
    try:
        draft.rename(root / digest)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (root / digest).is_dir():  # no other worker was first: the disk is at fault
            raise
