"""What a person sees: the console, the progress bar, tables, error lines, the one asyncio.run."""

import asyncio
import difflib
import fnmatch
import logging
import os
import shlex
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rookery.config import parse_overrides
from rookery.errors import ConfigError

__all__ = [
    "check_flags",
    "console",
    "fail",
    "log_warnings",
    "quiet_libraries",
    "resumable",
    "run_async",
    "token_progress",
]

console = Console()
_errors = Console(stderr=True)
Result = TypeVar("Result")


def fail(sentence: str) -> None:
    """One error line on stderr."""
    _errors.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """The only place where an event loop starts."""
    return asyncio.run(work)


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Ctrl-C in the block says how to go on with the run."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        fail(f"Interrupted. Go on with: rookery runs resume {shlex.quote(str(path))}")
        raise


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
    """The flags, those that match `paths` taken from the current folder, as a shell completes them.

    Paths inside a config are relative to it, and a flag becomes a part of the config.
    """
    return [
        f"--{key}={Path(text).expanduser().absolute() if _is_any(key, paths) else text}"
        for key, text in parse_overrides(overrides)
    ]


def _is_any(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def log_warnings() -> None:
    """Warnings as lines on stderr."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=_errors, show_path=False, show_time=False)],
    )


def quiet_libraries() -> None:
    """Hugging Face prints bars and warnings of its own; ours say what matters."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log_warnings()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _TokenRate(ProgressColumn):
    """Tokens per second since the bar started."""

    def render(self, task: Task) -> Text:
        tokens, elapsed = task.fields.get("tokens", 0), task.elapsed or 0.0
        rate = tokens / elapsed if elapsed > 0 else 0.0
        return Text(f"{rate:,.0f} tok/s", style="cyan")


@contextmanager
def token_progress(*, is_quiet: bool = False) -> Iterator[Progress]:
    """A bar with counts, tokens per second, elapsed time and time left."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _TokenRate(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=_errors,
        disable=is_quiet,
    )
    with progress:
        yield progress
