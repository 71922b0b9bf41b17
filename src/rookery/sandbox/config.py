"""What a sandbox stops, what it lets through, and how an evaluator is called.

Everything is closed unless it is named here: network, devices, variables, folders.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rookery.config import Config

__all__ = ["BackendName", "EvaluatorConfig", "SandboxConfig"]

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
