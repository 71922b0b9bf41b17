"""The registry of one launched pool: the server processes it owns, so that others can clean up.

    registry = ServerRegistry.create(root, purpose="run")   # locked while this process lives
    registry.write([record, ...])
    reap_orphans(root)                                      # another process, later

The lock ends with its owner, however that ends. A registry is locked before it is written and read
only under a lock, so that one without an owner has lost it: processes that start at the same time
leave each other alone. A record names a process by id and start time, so that a later process with
the same id is never touched.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rookery.errors import FleetError, boundary
from rookery.model_names import cache_folder
from rookery.runtime.file_lock import FileLock
from rookery.runtime.guard import kill_group, process_start, signal_group

__all__ = [
    "FoundRegistry",
    "ServerRecord",
    "ServerRegistry",
    "find_registries",
    "process_start",
    "reap_orphans",
    "state_folder",
    "stop_processes",
]

logger = logging.getLogger(__name__)
LOGS_S = 7 * 24 * 3600.0
_POLL_S = 0.05
GRACE_S = 10.0
"""Time for a server to end by itself."""
_LIMIT_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """One server process. It leads its own process group, which holds its workers."""

    pid: int
    start: str
    """Start time in kernel ticks."""
    url: str
    model: str
    log: str
    num_restarts: int = 0

    @property
    def is_alive(self) -> bool:
        return bool(self.start) and process_start(self.pid) == self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRegistry:
    """A registry on disk, read without owning it."""

    folder: Path
    owner_pid: int
    is_locked: bool
    """True if its owner or a process that clears it up holds the lock."""
    has_owner: bool
    """True if its owner is alive and holds the lock."""
    purpose: str
    """`up`: a pool that serves others; `run`: the private pool of one program."""
    records: tuple[ServerRecord, ...]


class ServerRegistry:
    """Registry of this process's own pool."""

    def __init__(self, folder: Path, *, lock: FileLock, purpose: str) -> None:
        self.folder = folder
        self.lock = lock
        self._purpose = purpose

    @classmethod
    def create(cls, root: Path, *, purpose: str) -> "ServerRegistry":
        folder = root / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with boundary(FleetError, f"Creating {folder}", foreign=(OSError,)):
            folder.mkdir(parents=True, mode=0o700)
            lock = FileLock(folder / "registry.json")
            lock.wait()  # another process may be reading it
        registry = cls(folder, lock=lock, purpose=purpose)
        registry.write([])
        return registry

    def write(self, records: Sequence[ServerRecord]) -> None:
        """Replace the list in place, as a new file would have a new lock. One write, padded over
        the old content: the file can be read after a kill at any point."""
        document = {
            "owner_pid": os.getpid(),
            "owner_start": process_start(os.getpid()),
            "purpose": self._purpose,
            "servers": [asdict(record) for record in records],
        }
        with boundary(FleetError, f"Writing {self.folder}", foreign=(OSError,)):
            size = os.fstat(self.lock.descriptor).st_size
            os.pwrite(self.lock.descriptor, json.dumps(document).encode().ljust(size), 0)

    def close(self, *, keep_logs: bool) -> None:
        """Give up ownership. Remove the folder, except for its logs if `keep_logs`."""
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / "registry.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "modules", ignore_errors=True)
        self.lock.close()


def state_folder() -> Path:
    """Return the default folder of registries."""
    return cache_folder() / "fleet"


def find_registries(root: Path) -> list[FoundRegistry]:
    """Return every registry under a folder, oldest first, without those that are still empty."""
    registries = []
    for file in _files(root):
        with _locked(file, is_shared=True) as registry:
            if registry is not None:
                registries.append(registry)
    return registries


def stop_processes(records: Iterable[ServerRecord]) -> int:
    """Stop process groups that are not our children: ask, wait, then kill. Return their number."""
    alive = [record for record in records if record.is_alive]
    for record in alive:
        signal_group(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(record.is_alive for record in alive) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for record in alive:
        # Workers of a dead server may linger in its group.
        kill_group(record.pid)
    return len(alive)


def reap_orphans(root: Path) -> int:
    """Stop servers whose owner died without stopping them; return their number. Logs that were kept
    after a failure are removed after a week."""
    num = 0
    _remove_old_logs(root)
    for registry in _claim_ownerless(root):
        stopped = stop_processes(registry.records)
        if stopped:
            logger.warning("stopped %d servers that process %d left", stopped, registry.owner_pid)
        num += stopped
        shutil.rmtree(registry.folder, ignore_errors=True)
    return num


def _remove_old_logs(root: Path) -> None:
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > LOGS_S
            if is_old and not (folder / "registry.json").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _claim_ownerless(root: Path) -> Iterator[FoundRegistry]:
    """Yield registries of dead owners, each locked in turn, so that one process clears it."""
    for file in _files(root):
        with _locked(file, is_shared=False) as registry:
            if registry is not None and not registry.is_locked:
                yield registry


def _files(root: Path) -> list[Path]:
    return sorted(root.glob("*/registry.json"), key=_age) if root.is_dir() else []


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _locked(file: Path, *, is_shared: bool) -> Iterator[FoundRegistry | None]:
    """Yield the registry, with its lock if nobody owns it; None if it is empty or gone."""
    try:
        lock = FileLock(file, flags=os.O_RDWR)
    except OSError:
        yield None
        return
    with lock:
        is_locked = not lock.take(is_shared=is_shared)
        yield _read(file, lock.descriptor, is_locked=is_locked)


def _read(file: Path, descriptor: int, *, is_locked: bool) -> FoundRegistry | None:
    try:
        document = json.loads(os.pread(descriptor, _LIMIT_BYTES, 0))
        owner_pid = int(document["owner_pid"])
        start = process_start(owner_pid)
        return FoundRegistry(
            folder=file.parent,
            owner_pid=owner_pid,
            # A process that clears it up may hold the lock too; see `has_owner`.
            is_locked=is_locked,
            has_owner=is_locked and start == document.get("owner_start", start),
            purpose=str(document["purpose"]),
            records=tuple(ServerRecord(**server) for server in document["servers"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
