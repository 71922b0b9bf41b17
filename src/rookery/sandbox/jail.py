"""What a sandbox stops and lets through, and the ways to jail its server, best first.

Everything is closed unless the config names it: network, devices, variables, folders. A backend
turns the config into the command that starts the server, and says how places look from inside.

bubblewrap   namespaces: nothing but what is bound exists inside
sandlock     Landlock and seccomp, from Linux 6.12: an allow-list over the files of the machine
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
    """The limits hold for all processes of a candidate together."""

    backend: BackendName | None = None
    """None takes the first of bubblewrap and sandlock that works here. `unsafe` stops next to
    nothing, and is never taken unless named."""
    memory_bytes: int = Field(default=2 * _GB, ge=2**24)
    """Beyond what the evaluator's imports have taken."""
    max_processes: int = Field(default=64, ge=1)
    """Threads count."""
    cpu_s: float | None = Field(default=None, gt=0)
    """CPU time; None leaves it to the evaluator's timeout."""
    scratch_bytes: int = Field(default=_GB, ge=2**16)
    """The size of the folder for temporary files, and of shared memory. They take memory."""
    output_bytes: int = Field(default=16 * 2**20, ge=1)
    """What may be printed; more ends the candidate."""
    result_bytes: int = Field(default=16 * 2**20, ge=2**10)
    """Metrics and artifacts as JSON; more ends the candidate."""
    startup_s: float = Field(default=120.0, gt=0)
    """How long the evaluator's imports may take."""
    network: bool = False
    """True opens the network of this machine, loopback included."""
    devices: tuple[Path, ...] = ()
    """Such as /dev/nvidia0."""
    variables: tuple[str, ...] = ()
    """Environment variables to hand in, by name. All others are hidden."""
    readable: tuple[Path, ...] = ()
    """Files and folders to show, read-only, besides the system's, Python's and the evaluator's."""


class EvaluatorConfig(Config):
    """An evaluator of OpenEvolve: a Python file with `evaluate(program_path)`."""

    file: Path
    """A copy of its folder is visible inside, read-only, without hidden files."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall time of each stage."""
    cascade: bool = True
    """Run `evaluate_stage1` to `evaluate_stage3` where the evaluator has them."""
    thresholds: tuple[float, ...] = (0.5, 0.75, 0.9)
    """What stage 1 and stage 2 must reach for the next stage to run."""
    suffix: str = Field(default=".py", pattern=r"^(\.[A-Za-z0-9_+-]+)*$")
    """How the program's file name ends."""


Isolation = Literal["namespaces", "landlock", "jail", "none"]
"""What separates a candidate from the server: see `inside/isolation.py`. `jail`: nothing does, so
that a jail serves one candidate only; what `namespaces` becomes where they cannot be nested."""
_START = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from rookery_inside.server import main; sys.path.pop(0); main(json.loads(sys.argv[2]))"
)
_NEVER_CPU_S = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """`environment` is all the variables there are inside."""

    command: Sequence[str]
    environment: dict[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Paths of this box as results and output show them: text enters prompts, which must not
    depend on the name of a temporary folder."""


def box_aliases(box: SandboxPaths) -> dict[str, str]:
    """For backends without mounts: the names that the same places have in bubblewrap."""
    return {str(box.scratch): "/tmp", str(box.inside): "/rookery"}


def server_command(
    config: SandboxConfig, box: SandboxPaths, *, inside: Path, scratch: Path, isolation: Isolation
) -> list[str]:
    """Python, the code of the server and its settings. `inside` is where the jail shows it."""
    settings = {
        "evaluator": str(inside / box.evaluator),
        "scratch": str(scratch),
        "isolation": isolation,
        "scratch_bytes": config.scratch_bytes,
        "memory_bytes": config.memory_bytes,
        "max_processes": config.max_processes,
        "cpu_s": int(config.cpu_s) + 1 if config.cpu_s is not None else _NEVER_CPU_S,
    }
    # -B: nothing can be written where modules lie. -s -P: no module from elsewhere.
    return [sys.executable, "-B", "-s", "-P", "-c", _START, str(inside), json.dumps(settings)]


def environment(config: SandboxConfig, scratch: Path) -> dict[str, str]:
    """A fixed one and the variables that the config names.

    One thread per candidate for numerical libraries: many candidates run at a time, and a sum must
    not depend on the number of cores. A fixed hash seed: nor on the order of a set.
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
    """Where this Python and its packages lie, also by their real names; not below /usr."""
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
    """What the config shows besides; each must be there."""
    for path in (*config.readable, *config.devices):
        if not path.exists():
            raise SandboxError(
                f"The sandbox's `readable` or `devices` name {path}, which does not exist: "
                "create it, or leave it out."
            )
    return [path.absolute() for path in config.readable]


# No jail: a plain process with limits. A generated program can do what its user can do.


def unsafe_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    """The server's command as it is. Only the environment is hidden."""
    command = server_command(config, box, inside=box.inside, scratch=box.scratch, isolation="none")
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )


# bubblewrap: a jail of namespaces in which only what is bound exists. As a normal user it has a
# user namespace, as root none: bubblewrap mounts with root's rights (Python may lie in root's
# home), and the server continues as nobody before it imports anything (`inside/isolation.py`,
# `drop_root`).

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime")
_ETC_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "ssl", "ca-certificates", "pki")
_INSIDE = Path("/rookery")
_USER = "1000"


def bubblewrap_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    """The command line of `bwrap`."""
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
    # A candidate's own /tmp would hide what is bound below it.
    scratch = Path("/scratch" if any(p.is_relative_to("/tmp") for p in shown) else "/tmp")
    command = [program, *_namespaces(config), *_system(config)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # A shared mapping of /dev/zero is memory that nobody counts. /dev/full reads the same.
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
    # Else bwrap makes it for root alone, and the server continues as nobody.
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in (*_ETC, *(_ETC_NETWORK if config.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _bind(path: Path) -> Iterator[str]:
    """Bind a path under its own name. bwrap gives the folders above it the rights that they have
    outside, and those of a home may shut out the user inside."""
    for parent in [*path.parents][-2::-1]:
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", str(path), str(path))


# sandlock: Landlock and seccomp. A program of its own (`sandlock_launcher.py`) holds the jail:
# sandlock answers system calls in the process that started it, which must not be an event loop.

_READABLE_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_PROC = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version")
"""Of /proc nothing about processes: sandlock opens its files in the name of the user, so that one
would show the memory of another. The server gets what it needs from outside."""
_READABLE_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_READABLE_ETC_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SERVER_PROCESSES = 2 + OWN_PROCESSES
"""The server, one more while it tries something, and the candidate's that are ours."""


def sandlock_jail(config: SandboxConfig, box: SandboxPaths) -> Jail:
    """The launcher's command line: a policy, then the server's command."""
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
"""Where it holds 1, as on Ubuntu since 24.04, an installed bubblewrap may make no namespaces."""


def find_remedy(backend: BackendName, *, restriction: Path = RESTRICTION) -> str:
    """The command that may make it work here; empty where none is known."""
    if backend == "bubblewrap":
        if shutil.which("bwrap") is None:
            return "apt-get install bubblewrap"
        if restriction.exists() and restriction.read_text().strip() == "1":
            return f"sudo sysctl -w kernel.{restriction.name}=0"
    if backend == "sandlock" and importlib.util.find_spec("sandlock") is None:
        return "pip install sandlock"
    return ""
