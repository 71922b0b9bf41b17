"""The blobs of a run: adapters, checkpoints and programs, named by the hash of their content.

    digest = run.blobs.put_folder(adapter_folder)      # copies; equal content is stored once
    await run.append("candidate", {"id": "c7", "adapter": digest})
    run.blobs.path(digest)                             # a folder that a server can load from

    with run.blobs.stage() as folder:                  # large: written in place, not copied
        await trainer.save(folder)
        digest = run.blobs.put_folder(folder)

A blob is a file or a folder under `blobs/<digest>`, stored as a whole or not at all, and durable
when `put_*` returns: append the event that names it afterwards. Small puts wait a few milliseconds
for the disk; for gigabytes call `put_folder` through `asyncio.to_thread`.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rookery.errors import RunError
from rookery.runs.disk import disk_boundary, new_scratch, sync_folder, sync_tree, write_file

__all__ = ["BlobStore", "BlobView"]

DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobView:
    """Read access to the blobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str, *, verify: bool = False) -> Path:
        """Return the file or folder of a blob. `verify` reads it whole and compares the hash."""
        path = self._place(digest)
        if not path.exists():
            raise RunError(f"{self._folder} holds no blob {digest}.")
        if verify:
            with disk_boundary(f"Reading the blob {path}"):
                actual = _hash_folder(path) if path.is_dir() else _hash_file(path)
            if actual != digest:
                raise RunError(
                    f"The blob {path} is damaged: its content hashes to {actual}. Restore it from "
                    "a copy, or start again from an event before it."
                )
        return path

    def read_bytes(self, digest: str, *, verify: bool = False) -> bytes:
        """Return the content of a blob that was put as bytes."""
        path = self.path(digest, verify=verify)
        if not path.is_file():
            raise RunError(f"The blob {digest} is a folder: use path(digest).")
        with disk_boundary(f"Reading the blob {path}"):
            return path.read_bytes()

    def digests(self) -> list[str]:
        """Return the digests of all blobs, sorted."""
        if not self._folder.is_dir():
            return []
        return sorted(p.name for p in self._folder.iterdir() if DIGEST.fullmatch(p.name))

    def _place(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise RunError(f"Got the digest {digest!r}: a digest is 64 hexadecimal digits.")
        return self._folder / digest


class BlobStore(BlobView):
    """The blobs of the process that owns the run: the only writer. Thread-safe."""

    def __init__(self, folder: Path, *, scratch: Path, check_owner: Callable[[], None]) -> None:
        super().__init__(folder)
        self._scratch = scratch
        self._check_owner = check_owner

    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their SHA-256."""
        self._check_owner()
        digest = hashlib.sha256(data).hexdigest()
        place = self._place(digest)
        if place.exists():
            self._sync()
        else:
            write_file(place, data, scratch=self._scratch)
        return digest

    def put_folder(self, path: Path) -> str:
        """Store the files of a folder and return the hash of their names and contents.

        A folder from `stage` is moved, any other is copied. Dates, permissions and empty folders
        are not kept; linked files are copied as files.
        """
        self._check_owner()
        names = _names(path)
        if path.parent == self._scratch:
            return self._seal(path)
        with self.stage() as staged, disk_boundary(f"Copying {path} to {self._folder}"):
            for name in names:
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path / name, staged / name)
            return self._seal(staged)

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """Yield an empty folder to fill and pass to `put_folder`; it is removed otherwise."""
        self._check_owner()
        staged = new_scratch(self._scratch)
        with disk_boundary(f"Making {staged}"):
            staged.mkdir()
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def remove(self, digest: str) -> None:
        """Delete a blob as a whole, such as a checkpoint that no resume needs."""
        self._check_owner()
        self._remove([self.path(digest)])

    def prune(self, *, keep: Collection[str]) -> int:
        """Delete all other blobs and return their number, such as rollouts before the last
        checkpoint. `keep` must name all that a resume needs, including checkpoints."""
        self._check_owner()
        for digest in keep:
            self.path(digest)  # refuses misspelt digests: their blobs would be deleted
        doomed = [self._place(digest) for digest in sorted(set(self.digests()) - set(keep))]
        self._remove(doomed)
        return len(doomed)

    def _remove(self, paths: Sequence[Path]) -> None:
        doomed = {path: new_scratch(self._scratch) for path in paths}
        with disk_boundary(f"Removing blobs of {self._folder}"):
            for path, scratch in doomed.items():
                os.rename(path, scratch)
            self._sync()
            for scratch in doomed.values():
                if scratch.is_dir():
                    shutil.rmtree(scratch)
                else:
                    scratch.unlink()

    def _seal(self, staged: Path) -> str:
        """Force a staged folder to disk, hash its files, and move it into place."""
        with disk_boundary(f"Storing {staged} in {self._folder}"):
            for name in _names(staged):
                if (staged / name).is_symlink():
                    raise RunError(f"{staged / name} is a link: write the file itself.")
            sync_tree(staged)
            digest = _hash_folder(staged)
            try:
                os.rename(staged, self._place(digest))
            except OSError as error:
                # Stored before, by this or another thread: `stage` removes this copy.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            self._sync()
        return digest

    def _sync(self) -> None:
        """Sync even if the blob exists: a process killed before its own sync may have put it."""
        with disk_boundary(f"Writing {self._folder}"):
            sync_folder(self._folder)


def _names(folder: Path) -> list[str]:
    """Return the files below a folder as sorted relative paths; RunError for others."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: for a single file use put_bytes.")
    names: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=_raise):
        for name in folders:
            if (Path(parent) / name).is_symlink():
                raise RunError(f"{Path(parent) / name} links to a folder: copy the folder there.")
        for name in files:
            path = Path(parent) / name
            if not path.is_file():
                raise RunError(f"{path} is not a regular file, or links to nothing: remove it.")
            names.append(path.relative_to(folder).as_posix())
    if not names:
        raise RunError(f"{folder} holds no files: there is nothing to store.")
    return sorted(names)


def _raise(error: OSError) -> None:
    raise RunError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_folder(folder: Path) -> str:
    """Return the SHA-256 over the name and the SHA-256 of every file, in order of name."""
    manifest = [[name, _hash_file(folder / name)] for name in _names(folder)]
    return hashlib.sha256(b"folder\n" + json.dumps(manifest).encode()).hexdigest()
