"""The ledger of one launched pool: which server processes it owns, for whoever comes after.

    ledger = Ledger.create(root, purpose="run")     # its file is locked while this process lives
    ledger.write([record, ...])
    for left in find_ledgers(root):                 # another process, later
        if not left.has_owner: stop_processes(left.records)

The lock is `flock`: it ends with its owner, however that ends. A record names a process by its id
and start time, so that a later process with the same id is never touched.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rookery.errors import FleetError, boundary

__all__ = [
    "FoundLedger",
    "Ledger",
    "ServerRecord",
    "find_ledgers",
    "process_start",
    "signal_group",
    "state_folder",
    "stop_processes",
]

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """One server process. It leads its own process group, which its workers are in."""

    pid: int
    start: str
    """Start time in kernel ticks."""
    url: str
    model: str
    log: str

    @property
    def is_alive(self) -> bool:
        return bool(self.start) and process_start(self.pid) == self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLedger:
    """A ledger on disk, read without owning it."""

    folder: Path
    owner_pid: int
    has_owner: bool
    """Its owner lives and holds the lock."""
    purpose: str
    """`up`: a pool that serves others; `run`: the private pool of one program."""
    records: tuple[ServerRecord, ...]


class Ledger:
    """The ledger of this process's own pool."""

    def __init__(self, folder: Path, *, descriptor: int, purpose: str) -> None:
        self.folder = folder
        self._descriptor = descriptor
        self._purpose = purpose

    @classmethod
    def create(cls, root: Path, *, purpose: str) -> "Ledger":
        folder = root / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with boundary(FleetError, f"Creating {folder}", foreign=(OSError,)):
            folder.mkdir(parents=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(folder / "ledger.json", flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ledger = cls(folder, descriptor=descriptor, purpose=purpose)
        ledger.write([])
        return ledger

    def write(self, records: Sequence[ServerRecord]) -> None:
        """Replace the list in place: a new file would have a new lock."""
        document = {
            "owner_pid": os.getpid(),
            "purpose": self._purpose,
            "servers": [asdict(record) for record in records],
        }
        text = json.dumps(document).encode()
        with boundary(FleetError, f"Writing {self.folder}", foreign=(OSError,)):
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def close(self, *, keep_logs: bool) -> None:
        """Give up ownership; what is left of the folder are the logs, where they are wanted."""
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / "ledger.json").unlink(missing_ok=True)
        os.close(self._descriptor)


def state_folder() -> Path:
    """`fleet` under `$ROOKERY_CACHE`, else under `rookery` in the user's cache folder."""
    own = os.environ.get("ROOKERY_CACHE")
    if own:
        return Path(own).expanduser() / "fleet"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rookery" / "fleet"


def find_ledgers(root: Path) -> list[FoundLedger]:
    """Every ledger under a folder, oldest first; those being written are read whole or skipped."""
    files = sorted(root.glob("*/ledger.json"), key=_age) if root.is_dir() else []
    return [ledger for file in files if (ledger := _read(file)) is not None]


def stop_processes(records: Iterable[ServerRecord], *, grace_s: float = 10.0) -> int:
    """Stop process groups that are not our children: ask, wait, then force. How many there were."""
    alive = [record for record in records if record.is_alive]
    for record in alive:
        signal_group(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(record.is_alive for record in alive) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for record in alive:
        # Workers of a server that is gone may linger in its group.
        signal_group(record.pid, signal.SIGKILL)
    return len(alive)


def process_start(pid: int) -> str:
    """When a process started, in kernel ticks; "" for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    after_name = fields.rpartition(")")[2].split()
    return "" if not after_name or after_name[0] in "ZX" else after_name[19]


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all it started; nothing when they are gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> FoundLedger | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        has_owner = False
    except OSError:
        has_owner = True
    finally:
        os.close(descriptor)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        records = tuple(ServerRecord(**server) for server in document["servers"])
        return FoundLedger(
            folder=file.parent,
            owner_pid=int(document["owner_pid"]),
            has_owner=has_owner,
            purpose=str(document["purpose"]),
            records=records,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
