"""A jail: the command that starts the server in it, and how the places look from inside."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rookery.errors import SandboxError
from rookery.sandbox.box import Box
from rookery.sandbox.config import SandboxConfig

__all__ = [
    "Isolation",
    "Jail",
    "box_aliases",
    "environment",
    "python_folders",
    "readable_paths",
    "server_command",
    "unsafe_jail",
]

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


def box_aliases(box: Box) -> dict[str, str]:
    """For backends without mounts: the names that the same places have in bubblewrap."""
    return {str(box.scratch): "/tmp", str(box.inside): "/rookery"}


def server_command(
    config: SandboxConfig, box: Box, *, inside: Path, scratch: Path, isolation: Isolation
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
            raise SandboxError(f"`readable` or `devices` of the sandbox names {path}: not there.")
    return [path.absolute() for path in config.readable]


# No jail: a plain process with limits. A generated program can do what its user can do.


def unsafe_jail(config: SandboxConfig, box: Box) -> Jail:
    """The server's command as it is. Only the environment is hidden."""
    command = server_command(config, box, inside=box.inside, scratch=box.scratch, isolation="none")
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )
