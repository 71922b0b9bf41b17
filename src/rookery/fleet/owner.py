"""Who put adapters where, so that others can clear up after a process that was killed.

    /dev/shm/rookery-adapters-7f3a2b1c9d4e/     one fleet's folder
        .owner                                  locked as long as the fleet is open:
            4f1e6c0a-93a1-...                       this machine since it was last started
            http://127.0.0.1:8000                   a server that may know adapters of this fleet
        poet@3fa9~7f3a2b1c9d4e/                 an adapter, by the name that servers know it by

The token at the end of a name says who registered it: a name that another process left on a server
is never taken for one's own. Whether the owner still lives is told by its lock, which only the same
machine can judge.
"""

import fcntl
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Owner", "claim_folder", "find_left"]

_PREFIX = "rookery-adapters-"
_RECORD = ".owner"
_TOKEN_BYTES = 6


@dataclass(slots=True)
class Owner:
    """A folder under `parent`, its token, and the servers that may know names of this token."""

    parent: Path
    token: str
    lock: int
    """The descriptor of the record."""
    servers: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.parent / f"{_PREFIX}{self.token}"

    def note_server(self, url: str) -> None:
        """Before the first adapter is registered there: nothing after this call is lost."""
        if url not in self.servers:
            self.servers.add(url)
            os.write(self.lock, f"{url}\n".encode())

    def remove(self) -> None:
        """The folder, and adapters of this owner that were put beside it."""
        for path in (self.folder, *self.parent.glob(f"*~{self.token}")):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def claim_folder(parent: Path) -> Iterator[Owner]:
    """A new folder under `parent`, removed at the end unless a server may still know names of it:
    then it stays, for `find_left`."""
    owner = _claim(parent)
    try:
        yield owner
    finally:
        if not owner.servers:
            owner.remove()
        os.close(owner.lock)


def find_left(parent: Path) -> Iterator[Owner]:
    """Owners that are dead, each locked while the loop is at it. Blocks for nobody."""
    for record in parent.glob(f"{_PREFIX}*/{_RECORD}"):
        try:
            lock = os.open(record, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or cleared by another process just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            machine, *servers = os.pread(lock, 2**20, 0).decode().split("\n")
            if machine == _machine():
                token = record.parent.name.removeprefix(_PREFIX)
                # What follows the last line end was not written to its end, nor acted on.
                yield Owner(parent, token, lock, set(servers[:-1]))
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _claim(parent: Path) -> Owner:
    owner = Owner(parent, secrets.token_hex(_TOKEN_BYTES), lock=-1)
    owner.folder.mkdir()
    owner.folder.chmod(0o755)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    owner.lock = os.open(owner.folder / _RECORD, flags, 0o644)
    # Locked before it says whose it is: a record that says so and is not locked has a dead owner.
    fcntl.flock(owner.lock, fcntl.LOCK_EX)
    os.write(owner.lock, f"{_machine()}\n".encode())
    return owner


def _machine() -> str:
    """This machine since it was started: what held a lock before that is dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()
