"""The ways to jail the server, best first. Each turns a config into a command line.

bubblewrap   namespaces: nothing but what is bound exists inside
sandlock     Landlock and seccomp: an allow-list over the files of the machine
unsafe       a plain process with limits
"""

from collections.abc import Callable

from rookery.sandbox.backends.bubblewrap import bubblewrap_jail
from rookery.sandbox.backends.jail import Jail, unsafe_jail
from rookery.sandbox.backends.sandlock import sandlock_jail
from rookery.sandbox.box import Box
from rookery.sandbox.config import BackendName, SandboxConfig

__all__ = ["BACKENDS", "REMEDIES", "SAFE_BACKENDS", "Jail"]

BACKENDS: dict[BackendName, Callable[[SandboxConfig, Box], Jail]] = {
    "bubblewrap": bubblewrap_jail,
    "sandlock": sandlock_jail,
    "unsafe": unsafe_jail,
}
SAFE_BACKENDS: tuple[BackendName, ...] = ("bubblewrap", "sandlock")
REMEDIES: dict[BackendName, str] = {
    "bubblewrap": "apt-get install bubblewrap",
    "sandlock": "pip install sandlock",
    "unsafe": "",
}
"""The line that installs it."""
