"""Which process trains the weights of a server on this machine: at most one.

    lock = TrainerLock.take(url)          # FleetError when another process has it
    is_trained(url)                       # by whatever process of this machine
    lock.release()

The lock is a name of the kernel's (an abstract socket): it is free as soon as the process that took
it has ended, however that was. Other systems than Linux have none, and nothing is locked there.
"""

import errno
import os
import socket
import sys
import time
from urllib.parse import urlsplit

from rookery.errors import FleetError

__all__ = ["TrainerLock", "is_trained"]

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


def _name(url: str) -> str:
    return f"\0rookery-trainer-{urlsplit(url).port}"


def _bind(name: str) -> int | None:
    """The descriptor of the name; None when it is taken."""
    with socket.socket(socket.AF_UNIX) as own:
        try:
            own.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        return own.detach()


_held: dict[str, TrainerLock] = {}
