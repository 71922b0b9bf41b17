"""Configs of a sandbox and its evaluator, and the backends that jail its server, best first.

Network, devices, variables and folders are closed unless the config names them. A backend turns
the config into the command that starts the server, and maps host paths to paths inside.

bubblewrap   namespaces: only bound paths exist inside
sandlock     Landlock and seccomp, Linux 6.12 or later: an allow-list over the machine's files
unsafe       a plain process with limits
"""

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import SandboxError
from rookery.sandbox.box import SandboxPaths
from rookery.sandbox.inside.isolation import MACHINES, OWN_PROCESSES

__all__ = [
    "BACKENDS",
    "SAFE_BACKENDS",
    "BackendName",
    "EvaluatorConfig",
    "Jail",
    "SandboxConfig",
    "find_remedy",
]


BackendName = Literal["bubblewrap", "sandlock", "unsafe"]
_GB = 2**30


class SandboxConfig(Config):
    """Each limit applies to all processes of a candidate together."""

    backend: BackendName | None = None
    """None takes the first of bubblewrap and sandlock that works on this machine. `unsafe` protects
    almost nothing and must be named explicitly."""
    memory_bytes: int = Field(default=2 * _GB, ge=2**24)
    """Memory limit, on top of the memory that the evaluator's imports take."""
    max_processes: int = Field(default=64, ge=1)
    """Limit on processes and threads."""
    cpu_s: float | None = Field(default=None, gt=0)
    """Limit on CPU time; None sets none, so that only the evaluator's timeout applies."""
    scratch_bytes: int = Field(default=_GB, ge=2**16)
    """Size limit of the temporary folder, and of shared memory. Both take memory."""
    output_bytes: int = Field(default=16 * 2**20, ge=1)
    """Limit on printed output; a candidate that prints more is ended."""
    result_bytes: int = Field(default=16 * 2**20, ge=2**10)
    """Limit on metrics and artifacts as JSON; a candidate with more is ended."""
    startup_s: float = Field(default=120.0, gt=0)
    """Time limit for the evaluator's imports."""
    network: bool = False
    """True opens this machine's network, loopback included."""
    devices: tuple[Path, ...] = ()
    """Device files to open, such as /dev/nvidia0."""
    variables: tuple[str, ...] = ()
    """Names of environment variables to pass in. All others are hidden."""
    readable: tuple[Path, ...] = ()
    """Further files and folders to show read-only. The system's, Python's and the evaluator's are
    always shown."""


class EvaluatorConfig(Config):
    """An OpenEvolve evaluator: a Python file with `evaluate(program_path)`."""

    file: Path
    """The evaluator's file. Programs see a read-only copy of its folder, without hidden files."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall-time limit of each stage."""
    cascade: bool = True
    """Run `evaluate_stage1` to `evaluate_stage3` if the evaluator has them."""
    thresholds: tuple[float, ...] = (0.5, 0.75, 0.9)
    """Scores that stage 1 and stage 2 must reach for the next stage to run."""
    suffix: str = Field(default=".py", pattern=r"^(\.[A-Za-z0-9_+-]+)*$")
    """File name suffix of the program."""


Isolation = Literal["namespaces", "landlock", "jail", "none"]
"""Isolation of a candidate from the server, see `inside/isolation.py`. `jail` is none: each jail
serves one candidate. `namespaces` becomes `jail` where namespaces cannot be nested."""
_START = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from rookery_inside.server import main; sys.path.pop(0); main(json.loads(sys.argv[2]))"
)
_NEVER_CPU_S = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """A command that starts a jailed server. `environment` is its complete environment."""

    command: Sequence[str]
    environment: dict[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Replacements for host paths in results and output. This text enters prompts, which must not
    depend on the name of a temporary folder."""


def box_aliases(box: SandboxPaths) -> dict[str, str]:
    """Map the box's paths to their names under bubblewrap, for backends without mounts."""
    return {str(box.scratch): "/tmp", str(box.inside): "/rookery"}


def server_command(
    config: SandboxConfig, box: SandboxPaths, *, inside: Path, scratch: Path, isolation: Isolation
) -> list[str]:
    """Return the server's command line. `inside` is the box's `inside/` as the jail sees it."""
    settings = {
        "evaluator": str(inside / box.evaluator),
        "scratch": str(scratch),
        "isolation": isolation,
        "scratch_bytes": config.scratch_bytes,
        "memory_bytes": config.memory_bytes,
        "max_processes": config.max_processes,
        "cpu_s": int(config.cpu_s) + 1 if config.cpu_s is not None else _NEVER_CPU_S,
    }
    # -B: module folders are read-only. -s -P: import no module from elsewhere.
    return [sys.executable, "-B", "-s", "-P", "-c", _START, str(inside), json.dumps(settings)]


def environment(config: SandboxConfig, scratch: Path) -> dict[str, str]:
    """Return a fixed environment plus the variables that the config names.

    Numerical libraries get one thread: many candidates run at a time, and a sum must not depend on
    the number of cores. The hash seed is fixed so that no result depends on set order.
    """
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    fixed = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "USER": "candidate",
        "LOGNAME": "candidate",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "Agg",
    } | dict.fromkeys(threads, "1")
    return fixed | {name: os.environ[name] for name in config.variables if name in os.environ}


def python_folders() -> list[Path]:
    """Return the folders of this Python and its packages, links resolved too, except below /usr."""
    names = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    names |= {os.path.realpath(name) for name in names}
    names.add(str(Path(os.path.realpath(sys.executable)).parents[1]))
    folders = sorted(Path(name) for name in names)
    folders = [f for f in folders if not f.is_relative_to("/usr") and f.is_dir()]
    home = Path.home()
    for folder in folders:
        if home.is_relative_to(folder):
            raise SandboxError(
                f"Python is installed in {folder}, which holds your home: generated programs would "
                "see all of it. Use a Python in a folder of its own: python3 -m venv FOLDER."
            )
    return folders


def readable_paths(config: SandboxConfig) -> list[Path]:
    """Return the config's `readable` paths; SandboxError if one of them or a device is missing."""
    for path in (*config.readable, *config.devices):
        if not path.exists():
            raise SandboxError(
                f"The sandbox's `readable` or `devices` name {path}, which does not exist: "
                "create it, or leave it out."
            )
    return [path.absolute() for path in config.readable]


def unsafe_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    """Run the server as a plain process with limits. Programs have all rights of their user."""
    command = server_command(config, box, inside=box.inside, scratch=box.scratch, isolation="none")
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )


# bubblewrap: a jail of namespaces in which only bound paths exist. A normal user gets a user
# namespace. Root gets none, because Python may lie in root's home and bubblewrap then needs root's
# rights to mount it; the server becomes nobody before it imports anything (`drop_root`).

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime")
_ETC_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "ssl", "ca-certificates", "pki")
_INSIDE = Path("/rookery")
_USER = "1000"


def bubblewrap_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("The program bwrap is not installed.")
    shown = [*python_folders(), *readable_paths(config)]
    for path in shown:
        if path.is_relative_to("/dev/shm"):
            raise SandboxError(
                f"{path} cannot be shown to programs: each has a /dev/shm of its own. Keep it in "
                "another folder."
            )
    # A candidate's own /tmp would hide paths that are bound below /tmp.
    scratch = Path("/scratch" if any(p.is_relative_to("/tmp") for p in shown) else "/tmp")
    command = [program, *_namespaces(config), *_system(config)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # A shared mapping of /dev/zero is unaccounted memory. /dev/full reads the same zeros.
    command += ["--dev-bind", "/dev/full", "/dev/zero"]
    for device in config.devices:
        command += ["--dev-bind", str(device), str(device)]
    for place in ("/dev/shm", "/tmp", str(scratch)):
        command += ["--size", str(config.scratch_bytes), "--perms", "1777", "--tmpfs", place]
    for path in shown:
        command += _bind(path)
    command += ["--ro-bind", str(box.inside), str(_INSIDE)]
    if scratch != Path("/tmp"):
        command += ["--remount-ro", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(scratch), "--"]
    command += server_command(config, box, inside=_INSIDE, scratch=scratch, isolation="namespaces")
    return Jail(command=command, environment=environment(config, scratch))


def _namespaces(config: SandboxConfig) -> Iterator[str]:
    yield from ("--die-with-parent", "--new-session", "--cap-drop", "ALL")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
    if not config.network:
        yield "--unshare-net"
    if os.geteuid() == 0:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"):
            yield from ("--cap-add", capability)
    else:
        yield from ("--unshare-user", "--uid", _USER, "--gid", _USER)


def _system(config: SandboxConfig) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _SYSTEM:
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)
    # By default bwrap makes /etc readable by root alone, and the server continues as nobody.
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in (*_ETC, *(_ETC_NETWORK if config.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _bind(path: Path) -> Iterator[str]:
    """Bind a path under its own name, with open parent folders: bwrap would copy the permissions of
    a home, which may shut out the user inside."""
    for parent in [*path.parents][-2::-1]:
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", str(path), str(path))


# sandlock: Landlock and seccomp. It answers system calls in the process that started it, which must
# not be an event loop. So a separate program (`sandlock_launcher.py`) starts the jail.

_READABLE_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_PROC = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version")
"""Visible files of /proc, none about processes: sandlock opens files with the user's rights, so a
process could read another's memory. The host process measures for the server."""
_READABLE_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_READABLE_ETC_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SERVER_PROCESSES = 2 + OWN_PROCESSES
"""The server, one transient child of it, and Rookery's own processes of a candidate."""


def sandlock_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    if importlib.util.find_spec("sandlock") is None:
        raise SandboxError("The package sandlock is not installed.")
    if platform.machine() not in MACHINES:
        raise SandboxError(
            f"sandlock does not keep a program from changing modes and times of files, and on "
            f"{platform.machine()} nothing else does: install bubblewrap."
        )
    readable = [
        *_READABLE_SYSTEM,
        *(f"/proc/{name}" for name in _PROC),
        *_READABLE_ETC,
        *(_READABLE_ETC_NETWORK if config.network else ()),
        *_DEVICES,
    ]
    readable += [str(path) for path in (*python_folders(), *readable_paths(config), box.inside)]
    writable = [box.scratch, Path("/dev/null"), *config.devices]
    policy = {
        "fs_readable": [path for path in readable if Path(path).exists()],
        "fs_writable": [str(path) for path in writable],
        "max_processes": config.max_processes + _SERVER_PROCESSES,
        "net_allow": ["*:*"] if config.network else [],
        "cwd": str(box.scratch),
    }
    launcher = Path(__file__).with_name("sandlock_launcher.py")
    command = [sys.executable, "-s", "-P", str(launcher), json.dumps(policy)]
    command += server_command(
        config, box, inside=box.inside, scratch=box.scratch, isolation="landlock"
    )
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )


BACKENDS: dict[BackendName, Callable[[SandboxConfig, SandboxPaths], Jail]] = {
    "bubblewrap": bubblewrap_jail,
    "sandlock": sandlock_jail,
    "unsafe": unsafe_jail,
}
SAFE_BACKENDS: tuple[BackendName, ...] = ("bubblewrap", "sandlock")
RESTRICTION = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
"""If this file holds 1, as on Ubuntu since 24.04, bubblewrap may not create namespaces."""


def find_remedy(backend: BackendName, *, restriction: Path = RESTRICTION) -> str:
    """Return a command that may make the backend work on this machine; "" if none is known."""
    if backend == "bubblewrap":
        if shutil.which("bwrap") is None:
            return "apt-get install bubblewrap"
        if restriction.exists() and restriction.read_text().strip() == "1":
            return f"sudo sysctl -w kernel.{restriction.name}=0"
    if backend == "sandlock" and importlib.util.find_spec("sandlock") is None:
        return "pip install sandlock"
    return ""
