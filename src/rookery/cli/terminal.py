"""What a person sees: the console, progress, notes, error lines, the one asyncio.run."""

import asyncio
import difflib
import fnmatch
import logging
import os
import shlex
import threading
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
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

from rookery.cli.stopping import run_stoppable
from rookery.config import parse_overrides
from rookery.errors import ConfigError

__all__ = [
    "check_flags",
    "console",
    "fail",
    "log_warnings",
    "paths_from_here",
    "quiet_libraries",
    "resumable",
    "run_async",
    "say",
    "show_notes",
    "token_progress",
]

LINE_EVERY_S = 10.0
"""Between two lines of progress in a log: a minute of it fits on a screen."""

console = Console()
_errors = Console(stderr=True)
Result = TypeVar("Result")


def fail(sentence: str) -> None:
    """One error line on stderr."""
    _errors.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)


def say(line: str) -> None:
    """A line about what is being done, on stderr."""
    _errors.print(line, highlight=False, markup=False, soft_wrap=True)


def show_notes(notes: Iterable[str]) -> None:
    """What the reader of a result must know, on stderr."""
    for note in notes:
        _errors.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """The only place where an event loop starts. Ctrl-C and SIGTERM cancel the work."""
    return run_stoppable(work)


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Ctrl-C or SIGTERM in the block says how to go on with the run."""
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
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log_warnings()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _TokenRate(ProgressColumn):
    """Tokens per second since the bar started."""

    def render(self, task: Task) -> Text:
        return Text(f"{_rate(task):,.0f} tok/s", style="cyan")


@contextmanager
def token_progress(*, is_quiet: bool = False) -> Iterator[Progress]:
    """A bar with counts, tokens per second, elapsed time and time left.

    Where no bar can be drawn (a pipe, a file, a job's log) the same as a line every 10 seconds,
    whether there was an update or not, and one at the end.
    """
    can_draw = _errors.is_terminal and not _errors.is_dumb_terminal
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
        disable=is_quiet or not can_draw,
    )
    with progress:
        if is_quiet or can_draw:
            yield progress
            return
        with _lines(progress):
            yield progress


@contextmanager
def _lines(progress: Progress) -> Iterator[None]:
    """A thread prints where the tasks are until the block ends: the work itself may be busy."""
    has_ended = threading.Event()

    def print_on() -> None:
        while not has_ended.wait(LINE_EVERY_S):
            _print_lines(progress)

    thread = threading.Thread(target=print_on, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        _print_lines(progress)


def _print_lines(progress: Progress) -> None:
    for task in progress.tasks:
        say(_line(task))


def _line(task: Task) -> str:
    """`ga 3  320 of 1,900  412 tok/s  0:32  ETA 1:20`"""
    name = Text.from_markup(task.description).plain
    total = f" of {task.total:,.0f}" if task.total is not None else ""
    parts = [name, f"{task.completed:,.0f}{total}", f"{_rate(task):,.0f} tok/s"]
    parts.append(_clock(task.elapsed or 0.0))
    if task.time_remaining is not None and not task.finished:
        parts.append(f"ETA {_clock(task.time_remaining)}")
    return "  ".join(parts)


def _rate(task: Task) -> float:
    """Tokens per second since the task began."""
    elapsed = task.elapsed or 0.0
    return task.fields.get("tokens", 0) / elapsed if elapsed > 0 else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
