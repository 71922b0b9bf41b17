"""A control group of a sandbox: limits on memory and processes that the kernel holds.

Made below or beside the group of this process, in both versions of control groups, where the user
may write there; elsewhere the watchdog of the server has to do.
"""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cgroup", "make_cgroup"]

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PREFIX = "rookery-"
_STALE_S = 60.0
"""An empty group of ours that is older than this is left over."""
_NUMBERS = itertools.count()
_NEEDED = {"memory", "pids"}


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The folders of one group: one in version 2, one per controller in version 1."""

    memory: Path
    pids: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self.memory, self.pids)))

    def limit(self, *, memory_bytes: int, max_processes: int) -> None:
        """Let the members take this much more than they have now."""
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
        """How many members the kernel has killed for memory; 0 when the group is removed."""
        is_v2 = self.memory == self.pids
        path = self.memory / ("memory.events" if is_v2 else "memory.oom_control")
        try:
            text = path.read_text()
        except OSError:
            return 0
        lines = dict(line.split() for line in text.splitlines())
        return int(lines.get("oom_kill", 0))

    def remove(self) -> bool:
        """Whether it is gone; False while it has members."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


def make_cgroup(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Cgroup | None:
    """A new group, or None where none can be made."""
    name = f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
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
    """Folders for (memory, pids) in which a group may be made, nearest first."""
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
        own = root / groups[""]
        for folder in (own, *own.parents):
            control = folder / "cgroup.subtree_control"
            if control.exists() and set(control.read_text().split()) >= _NEEDED:
                yield folder, folder
            if folder == root:
                return


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                folder.rmdir()
