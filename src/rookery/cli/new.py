"""`rookery new`: a small project that runs as it is, to change into your own."""

import shlex
import shutil
from pathlib import Path
from typing import Literal

from rookery.cli.terminal import say
from rookery.errors import ConfigError
from rookery.starters import PROJECTS

__all__ = ["new"]

Kind = Literal["genome", "grpo", "icm", "evolve", "scorer", "game", "pipeline"]
_NEXT: dict[Kind, str] = {
    "genome": "rookery genome run {0}/config.yaml",
    "grpo": "rookery grpo run {0}/config.yaml",
    "icm": "rookery icm run {0}/config.yaml",
    "evolve": "rookery evolve run {0}/initial_program.py {0}/evaluator.py -c {0}/config.yaml",
    "scorer": "rookery eval smollm2 {0}/taskset.yaml",
    "game": "rookery grpo run {0}/config.yaml",
    "pipeline": "rookery pipeline run {0}/config.yaml",
}
"""What runs a project of each kind."""
_SHARED: dict[Kind, tuple[str, ...]] = {
    "genome": ("scorer.py", "tasks.jsonl"),
    "grpo": ("scorer.py", "tasks.jsonl"),
    "scorer": ("scorer.py", "tasks.jsonl"),
    "game": ("tasks.jsonl",),
}
"""Files that several kinds have."""


def new(kind: Kind, folder: Path) -> int:
    """Write a small project: a config with comments, ten rows of data, a scorer where one is used.

    It runs as it is in some minutes on a CPU, and the next command is printed. Ten rows prove
    nothing: put in your own. All of them use `smollm2`; the first run fetches it, 93 MB.

        rookery new genome mine
        rookery new scorer judge

    genome: evolve adapters. grpo: train from a reward. icm: label without labels. evolve: evolve a
    program. scorer: a reward of your own, measured. game: grpo with several turns. pipeline:
    labels, then adapters trained on them, then a search among these.

    Parameters
    ----------
    kind
        What the project is for.
    folder
        Where to write it: a folder that is new or empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there and not an empty folder: give the name of a new one, such as "
            f"`rookery new {kind} my-{kind}`."
        )
    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECTS / kind, folder, ignore=ignored, dirs_exist_ok=True)
        for name in _SHARED.get(kind, ()):
            shutil.copyfile(PROJECTS / "shared" / name, folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error
    names = sorted(path.name for path in folder.iterdir())
    command = _NEXT[kind].format(shlex.quote(str(folder)))
    say(f"{folder}: {', '.join(names)}\nNext: {command}")
    return 0
