"""Whether this process is one of several that torchrun started, from what it put into the
environment."""

import os

__all__ = ["is_first_process", "num_local_processes", "num_processes"]


def is_first_process() -> bool:
    """The first one owns the run and speaks; the others compute. True without torchrun."""
    return int(os.environ.get("RANK") or 0) == 0


def num_processes() -> int:
    """On all machines; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def num_local_processes() -> int:
    """On this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
