"""Which process trains the weights of a server: at most one.

    lock = TrainerLock.take(url)          # FleetError when another process has it
    is_trained(url)                       # by whatever process of this machine
    lock.release()
    str(WeightsMark.own("step-3"))        # what the server is told before its weights change

The lock is a name of the kernel's (an abstract socket): it is free as soon as the process that took
it has ended, however that was. Other systems than Linux have none, and nothing is locked there.

The mark is kept by the server itself, as long as its process lives: who finds it knows that these
are not the weights that the server was started with, and whether their trainer is still there.
"""

import errno
import os
import socket
import sys
import time
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from rookery.errors import FleetError
from rookery.runtime.guard import process_start

__all__ = ["TrainerLock", "WeightsMark", "is_trained"]

ATTEMPTS = 20
"""Who asks whether a server is trained has the name for microseconds: try again."""
PAUSE_S = 0.01


class TrainerLock:
    """Held until it is released as often as it was taken: by one process, it is the same one."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._num_taken = 0

    def release(self) -> None:
        """Called once by each who took it. An object that is no longer used may live on for long:
        another process, whose server has the same port, must not wait for its end."""
        self._num_taken -= 1
        if self._num_taken == 0:
            del _held[self._name]
            os.close(self._descriptor)

    @classmethod
    def take(cls, url: str) -> "TrainerLock | None":
        """None where the system has no such locks."""
        name = _name(url)
        if sys.platform != "linux":
            return None
        lock = _held[name] = _held.get(name) or cls(name, _bound(name, url))
        lock._num_taken += 1
        return lock


def _bound(name: str, url: str) -> int:
    """The descriptor of the name; FleetError when another process has it."""
    for attempt in range(ATTEMPTS):
        descriptor = _bind(name)
        if descriptor is not None:
            return descriptor
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE_S)
    raise FleetError(
        f"Another process trains the weights of {url}, and each would overwrite those of the "
        "other: stop it, or start a server for each (`rookery fleet up`, or launch)."
    )


def is_trained(url: str) -> bool:
    """Whether a process trains its weights."""
    if sys.platform != "linux":
        return False
    descriptor = _bind(_name(url))
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


_SIGN = "rookery"


@dataclass(frozen=True, slots=True)
class WeightsMark:
    """The version of weights that were put into a server, and the process that did it.

    `rookery:3f2a91c04b77d1e8:4711:88112233:step-3` is step-3, by process 4711.
    """

    machine: str
    """Where process ids mean the same; empty: the system does not tell."""
    pid: int
    start: str
    version: str

    def __str__(self) -> str:
        return f"{_SIGN}:{self.machine}:{self.pid}:{self.start}:{self.version}"

    @classmethod
    def own(cls, version: str) -> "WeightsMark":
        """By this process."""
        return cls(_machine(), os.getpid(), process_start(os.getpid()), version)

    @classmethod
    def read(cls, text: str) -> "WeightsMark | None":
        """None: no mark of Rookery's."""
        sign, *words = text.split(":", 4)
        if sign != _SIGN or len(words) != 4 or not words[1].isdigit():
            return None
        return cls(words[0], int(words[1]), words[2], words[3])

    @property
    def is_own(self) -> bool:
        """Whether this process put them there."""
        return self == WeightsMark.own(self.version)

    def is_left(self, url: str) -> bool:
        """Whether nobody trains them any more: the process was of this machine and has ended, or is
        this one, which is done with the server."""
        if not self.machine or self.machine != _machine():
            return False
        is_alive = process_start(self.pid) == self.start
        return not is_alive or (self.pid == os.getpid() and not is_trained(url))


@cache
def _machine() -> str:
    """The kernel since it was started, and the space of process ids: containers have others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return blake2b(f"{boot}{space}".encode(), digest_size=8).hexdigest()


def _name(url: str) -> str:
    return f"\0rookery-trainer-{urlsplit(url).port}"


def _bind(name: str) -> int | None:
    """The descriptor of the name; None when it is taken."""
    with socket.socket(socket.AF_UNIX) as bound:
        try:
            bound.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        return bound.detach()


_held: dict[str, TrainerLock] = {}
