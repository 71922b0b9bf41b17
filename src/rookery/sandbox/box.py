"""The host folder of one sandbox: the code that runs in the jail, and a copy of the evaluator.

box/lock        held while the sandbox is open; a box whose lock is free is stale
box/log         output of the server and of the jail's launcher
box/scratch/    temporary files, for backends without mounts
box/inside/     visible in the jail, read-only: rookery_inside/, evaluator/
"""

import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import SandboxError
from rookery.runtime.file_lock import FileLock
from rookery.sandbox.inside.isolation import empty_folder

__all__ = ["Cgroup", "SandboxPaths", "make_cgroup", "open_box"]

# A control group lets the kernel enforce a sandbox's memory and process limits. It is created below
# or beside this process's own group (cgroup v1 or v2) if the user may write there. Otherwise only
# the watchdog in `server.py` enforces the limits.


_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP_PREFIX = "rookery-"
_STALE_S = 60.0
"""An empty Rookery group older than this is stale."""
_NUMBERS = itertools.count()
_NEEDED = {"memory", "pids"}


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The folders of one group: the same folder twice in v2, one per controller in v1."""

    memory: Path
    pids: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self.memory, self.pids)))

    def limit(self, *, memory_bytes: int, max_processes: int) -> None:
        """Set the limits to the members' present usage plus these amounts."""
        is_v2 = self.memory == self.pids
        usage = "memory.current" if is_v2 else "memory.usage_in_bytes"
        most = "memory.max" if is_v2 else "memory.limit_in_bytes"
        used = int((self.memory / usage).read_text())
        (self.memory / most).write_text(str(used + memory_bytes))
        if is_v2:
            with suppress(OSError):  # no swap accounting in this kernel
                (self.memory / "memory.swap.max").write_text("0")
        current = int((self.pids / "pids.current").read_text())
        (self.pids / "pids.max").write_text(str(current + max_processes))

    def num_oom_kills(self) -> int:
        """Return how many members the kernel killed for memory; 0 if the group is removed."""
        is_v2 = self.memory == self.pids
        path = self.memory / ("memory.events" if is_v2 else "memory.oom_control")
        try:
            text = path.read_text()
        except OSError:
            return 0
        lines = dict(line.split() for line in text.splitlines())
        return int(lines.get("oom_kill", 0))

    def remove(self) -> bool:
        """Remove the group and return whether it is gone; False while it has members."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


def make_cgroup(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Cgroup | None:
    """Create a group; None if this user may not create one."""
    name = f"{_CGROUP_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
    for memory, pids in _parents(root, membership):
        made = Cgroup(memory / name, pids / name)
        try:
            for parent in {memory, pids}:
                _sweep(parent)
            for folder in made.folders:
                folder.mkdir()
            for path in (made.memory / "cgroup.procs", made.pids / "pids.max"):
                path.open("r+").close()
        except OSError:
            made.remove()
            continue
        return made
    return None


def _parents(root: Path, membership: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the (memory, pids) folders in which a group may be created, nearest first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    groups: dict[str, str] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        groups |= {name: path.lstrip("/") for name in names.split(",")}
    if groups.keys() >= _NEEDED:
        yield root / "memory" / groups["memory"], root / "pids" / groups["pids"]
    elif "" in groups:
        current = root / groups[""]
        for folder in (current, *current.parents):
            control = folder / "cgroup.subtree_control"
            if control.exists() and set(control.read_text().split()) >= _NEEDED:
                yield folder, folder
            if folder == root:
                return


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_CGROUP_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                folder.rmdir()


_BOX_PREFIX = "rookery-sandbox-"
_NEW_S = 60.0
"""A box without a lock that is younger than this may still be under construction."""
MAX_FOLDER_BYTES = 2**30
"""Limit on an evaluator's folder; a larger one is most likely the wrong folder."""
_SKIPPED = ("__pycache__", "node_modules", "openevolve_output")


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    """Paths of one box. `evaluator` is relative to `inside`."""

    folder: Path
    evaluator: Path

    @property
    def inside(self) -> Path:
        return self.folder / "inside"

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def clear_scratch(self) -> None:
        """Empty the scratch folder before a new jail starts: a killed jail leaves the files of its
        last candidate behind. Blocks on the disk."""
        self.scratch.mkdir(mode=0o700, exist_ok=True)
        empty_folder(str(self.scratch))


@contextmanager
def open_box(evaluator: Path) -> Iterator[SandboxPaths]:
    """Create a box with a copy of the evaluator's folder; remove it on exit. Blocks on the disk."""
    if not evaluator.is_file():
        raise SandboxError(f"There is no evaluator file {evaluator}.")
    _box_sweep()
    folder = Path(tempfile.mkdtemp(prefix=_BOX_PREFIX))
    with FileLock(folder / "lock") as lock:
        try:
            lock.wait()
            box = SandboxPaths(folder=folder, evaluator=Path("evaluator") / evaluator.name)
            box.scratch.mkdir(mode=0o700)
            _copy(Path(__file__).parent / "inside", box.inside / "rookery_inside")
            _copy(evaluator.absolute().parent, box.inside / "evaluator")
            yield box
        finally:
            _remove(folder)


def _copy(source: Path, target: Path) -> None:
    """Copy regular files, world-readable. Links to files are followed, hidden names are skipped."""
    total = 0
    for folder, names, files in os.walk(source, followlinks=False):
        names[:] = [n for n in names if not n.startswith(".") and n not in _SKIPPED]
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True)
        there.chmod(0o755)
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            total += path.stat().st_size
            if total > MAX_FOLDER_BYTES:
                raise SandboxError(
                    f"The evaluator's folder {source} holds more than "
                    f"{MAX_FOLDER_BYTES // 2**20} MiB. It is copied into the sandbox: move the "
                    "evaluator to a folder of its own, and name large data in `readable`."
                )
            shutil.copyfile(path, there / name)
            (there / name).chmod(0o755 if os.access(path, os.X_OK) else 0o644)
    target.parent.chmod(0o755)


def _box_sweep() -> None:
    """Remove stale boxes that killed processes of this user left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_BOX_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            # The folder for temporary files is shared: never touch another user's entries.
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            # A partly removed box has lost its lock file; a new box does not have one yet.
            is_old = time.time() - status.st_mtime > _NEW_S
            flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if is_old else 0)
            with FileLock(folder / "lock", flags=flags) as lock:
                if lock.take():
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a box. Anything that cannot be removed is left for the next sweep."""
    with suppress(OSError):
        empty_folder(str(folder))
        folder.rmdir()
