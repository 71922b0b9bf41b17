"""What the commands share: the console, error lines, warnings, and flags that change a config."""

import difflib
import fnmatch
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from rookery.config import parse_overrides
from rookery.errors import ConfigError
from rookery.tasks.python_function import function_from_folder
from rookery.ui.display import Display

__all__ = ["check_flags", "console", "display", "fail", "log_warnings", "paths_from_here"]

FUNCTIONS = ("*.function",)
"""Flags that name a Python function, of any command."""

console = Console()
display = Display()


def fail(sentence: str) -> None:
    """One error line on stderr."""
    display.fail(sentence)


def check_flags(overrides: Sequence[str], *, fields: Collection[str], own: Sequence[str]) -> None:
    """Refuse a misspelt flag of the command itself, which the config would not know how to spell.

    `--rezume` of a command with `--resume` reaches its config as an override.
    """
    for key, _ in parse_overrides(overrides):
        head = key.partition(".")[0].replace("-", "_")
        near = difflib.get_close_matches(head, [*fields, *own], n=1)
        if head not in fields and near and near[0] in own:
            flag = near[0].replace("_", "-")
            raise ConfigError(f"--{key} is not a flag. Did you mean --{flag}?")


def paths_from_here(overrides: Sequence[str], *, paths: Sequence[str]) -> list[str]:
    """The flags, those that match `paths` taken from the current folder, as a shell completes them;
    so are the files of functions (`file.py:function`).

    Paths inside a config are relative to it, and a flag becomes a part of the config.
    """
    return [f"--{key}={_from_here(key, text, paths)}" for key, text in parse_overrides(overrides)]


def _from_here(key: str, text: str, paths: Sequence[str]) -> str:
    if _is_any(key, paths):
        return str(Path(text).expanduser().absolute())
    return function_from_folder(text, Path.cwd()) if _is_any(key, FUNCTIONS) else text


def _is_any(key: str, patterns: Sequence[str]) -> bool:
    written = key.replace("-", "_")
    return any(fnmatch.fnmatchcase(written, pattern) for pattern in patterns)


def log_warnings() -> None:
    """Warnings as lines on stderr, whatever else is logged to files."""
    handler = RichHandler(
        logging.WARNING, console=Console(stderr=True), show_path=False, show_time=False
    )
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[handler],
    )
