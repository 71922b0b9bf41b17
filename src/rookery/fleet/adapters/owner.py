"""Who put adapters where, so that other processes can clean up after one that was killed.

    /dev/shm/rookery-adapters-7f3a2b1c9d4e/     one fleet's folder
        .owner                                  locked as long as the fleet is open:
            4f1e6c0a-93a1-...                       this machine since it was last started
            http://127.0.0.1:8000                   a server that may know adapters of this fleet
        poet@3fa9~7f3a2b1c9d4e/                 an adapter, by the name that servers know it by

The token at the end of a name says who registered it: a name that another process left on a server
is never taken for one's own. Whether the owner still lives is told by its lock, which only the same
machine can judge.
"""

import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rookery.errors import FleetError, boundary
from rookery.runtime.file_lock import FileLock

__all__ = ["Owner", "claim_folder", "find_left"]

_PREFIX = "rookery-adapters-"
_RECORD = ".owner"
_TOKEN_BYTES = 6
_TOKEN = re.compile("[0-9a-f]+")
_OLD_S = 24 * 3600.0
"""A folder without a record is kept for this long: its owner may be just starting."""


@dataclass(slots=True)
class Owner:
    """A folder under `parent`, its token, and the servers that may know names of this token."""

    parent: Path
    token: str
    lock: FileLock | None = None
    """On the record; None: there is none."""
    servers: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.parent / f"{_PREFIX}{self.token}"

    def note_server(self, url: str) -> None:
        """Before the first adapter is registered there: nothing after this call is lost."""
        if url not in self.servers:
            self.servers.add(url)
            self._write(url)

    def claim(self) -> None:
        """Make the folder and its record. Locked before it says whose it is: a record that says so
        and is not locked has a dead owner."""
        self.folder.mkdir()
        self.folder.chmod(0o755)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self.lock = FileLock(self.folder / _RECORD, flags=flags, mode=0o644)
        self.lock.wait()
        self._write(_machine())

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()

    def _write(self, line: str) -> None:
        assert self.lock is not None, "claimed before"
        os.write(self.lock.descriptor, f"{line}\n".encode())

    def remove(self) -> None:
        """The folder, and adapters of this owner that were put beside it. The record goes last:
        what a removal that is cut short leaves can be found again."""
        record = self.folder / _RECORD
        for path in (*self.parent.glob(f"*~{self.token}"), *self.folder.glob("*")):
            if path != record:
                _delete(path)
        with suppress(OSError):
            if os.listdir(self.folder) == [_RECORD]:
                record.unlink()
            self.folder.rmdir()


@contextmanager
def claim_folder(parent: Path) -> Iterator[Owner]:
    """A new folder under `parent`, removed at the end unless a server may still know names of it:
    then it stays, for `find_left`."""
    with boundary(FleetError, f"No folder can be made in {parent}", foreign=(OSError,)):
        owner = Owner(parent, secrets.token_hex(_TOKEN_BYTES))
        owner.claim()
    try:
        yield owner
    finally:
        if not owner.servers:
            owner.remove()
        owner.close()


@contextmanager
def find_left(parent: Path) -> Iterator[list[Owner]]:
    """Owners that are dead, all locked inside the block. Blocks for nobody; a record that cannot be
    read is passed over."""
    with ExitStack() as stack:
        owners = (_lock_left(folder, stack) for folder in sorted(parent.glob(f"{_PREFIX}*")))
        yield [owner for owner in owners if owner is not None]


def _lock_left(folder: Path, stack: ExitStack) -> Owner | None:
    """The owner of a folder if it is dead; its lock is held until the stack ends."""
    left = Owner(folder.parent, folder.name.removeprefix(_PREFIX))
    if not _TOKEN.fullmatch(left.token):
        return None
    try:
        is_old = time.time() - folder.stat().st_mtime > _OLD_S
        left.lock = FileLock(folder / _RECORD, flags=os.O_RDWR | os.O_NOFOLLOW)
        stack.callback(left.close)
        if not left.lock.take():
            return None
        machine, *servers = os.pread(left.lock.descriptor, 2**20, 0).decode().split("\n")
    except FileNotFoundError:  # made just now, or all but removed
        return left if folder.is_dir() and is_old else None
    except (OSError, ValueError):  # it is another user's, or no record
        return None
    # What follows the last line end was not written to its end, nor acted on.
    left.servers = set(servers[:-1])
    return left if machine == _machine() or (is_old and not machine) else None


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _machine() -> str:
    """This machine since it was started: what held a lock before that is dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()
