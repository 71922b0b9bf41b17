"""Free TCP ports for servers that bind them later: reserved against every other Rookery process."""

import fcntl
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import FleetError, boundary

__all__ = ["Reservation", "is_free", "reserve_port"]

FIRST_PORT, LAST_PORT = 18_000, 18_999
"""Below the range from which the kernel gives ports to outgoing connections (32768 and up), so
that none of those can take the port before the server binds it."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A port that stays ours until it is released."""

    port: int
    descriptor: int

    def release(self) -> None:
        os.close(self.descriptor)


def reserve_port(host: str, *, first: int = FIRST_PORT) -> Reservation:
    """The first port from `first` on that nobody listens on and no other reservation holds."""
    folder = Path(tempfile.gettempdir()) / f"rookery-ports-{os.getuid()}"
    for port in range(first, max(first, LAST_PORT) + 1):
        with boundary(FleetError, f"Reserving a port in {folder}", foreign=(OSError,)):
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        if is_free(host, port):
            return Reservation(port, descriptor)
        os.close(descriptor)
    raise FleetError(
        f"No port from {first} to {max(first, LAST_PORT)} is free on {host}: stop what listens "
        "there, or set launch.port to the start of a free range."
    )


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
