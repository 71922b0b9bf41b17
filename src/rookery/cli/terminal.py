"""What a person sees: the console, the progress bar, tables, error lines, the one asyncio.run."""

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
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

__all__ = ["console", "fail", "quiet_libraries", "run_async", "token_progress"]

console = Console()
_errors = Console(stderr=True)
Result = TypeVar("Result")


def fail(sentence: str) -> None:
    """One error line on stderr."""
    _errors.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """The only place where an event loop starts."""
    return asyncio.run(work)


def quiet_libraries() -> None:
    """Hugging Face prints bars and warnings of its own; ours say what matters."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=_errors, show_path=False, show_time=False)],
    )
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
