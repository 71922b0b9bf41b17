"""What a person sees while something runs: lines, notes, a progress bar, servers starting.

    display = Display()                       # Display(is_quiet=True) shows nothing
    display.say("loading smollm2")
    with display.bar("founders", total=1900) as bar:
        bar.update(done=320, tokens=4_100)

Everything goes to stderr. Where no bar can be drawn (a pipe, a file, a job's log) the same is
printed as a line every 10 seconds, whether there was an update or not, and one at the end.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from rookery.ui.time_left import TimeLeft

if TYPE_CHECKING:
    from rookery.fleet import LaunchProgress

__all__ = ["Bar", "Display"]

LINE_EVERY_S = 10.0
"""Between two lines of progress in a log: a minute of it fits on a screen."""
_LINE = 70
"""Characters of a server's log line that are shown."""


class Display:
    """Lines and bars on stderr, or nothing at all."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._console = Console(stderr=True, quiet=is_quiet)

    def say(self, line: str) -> None:
        """A line about what is being done."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def note(self, lines: Iterable[str]) -> None:
        """What the reader of a result must know."""
        for line in lines:
            self._console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def hint(self, line: str) -> None:
        """What else can be done now: for a person at a terminal, not for a log."""
        if self._console.is_terminal:
            self._console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def fail(self, sentence: str) -> None:
        """One error line."""
        self._console.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)

    @contextmanager
    def bar(self, name: str, *, total: int | None) -> Iterator["Bar"]:
        """A bar with counts, tokens per second, elapsed time and time left."""
        can_draw = self._console.is_terminal and not self._console.is_dumb_terminal
        progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _TokenRate(),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=self._console,
            disable=self.is_quiet or not can_draw,
        )
        with progress:
            left = TimeLeft()
            left.expect(total or 0)
            task = progress.add_task(escape(name), total=total, tokens=0, left=left)
            bar = Bar(progress, task, left)
            if self.is_quiet or can_draw:
                yield bar
                return
            with self._lines(progress):
                yield bar

    @contextmanager
    def launching(self) -> Iterator[Callable[["LaunchProgress"], None]]:
        """A line per server on its way up; without a terminal, a line when it is ready."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[line]}", style="dim", markup=False),
            console=self._console,
            transient=True,
            disable=self.is_quiet or not self._console.is_terminal,
        )
        lines: dict[int, TaskID] = {}
        ready: set[int] = set()

        def show(now: "LaunchProgress") -> None:
            if len(ready) == now.num_servers:
                return  # a later restart: the bar of the work has the terminal
            text = f"server {now.index + 1} of {now.num_servers}  {now.url}  {now.seconds:4.0f} s"
            if now.index not in lines:
                progress.start()
                lines[now.index] = progress.add_task(text, total=None, line="")
            tail = "".join(c for c in now.line.strip()[-_LINE:] if c.isprintable())
            line = "ready" if now.is_ready else tail
            progress.update(lines[now.index], description=text, line=line)
            if now.is_ready:
                ready.add(now.index)
                if not self._console.is_terminal:
                    self.say(f"{text}  ready")
            if len(ready) == now.num_servers:
                progress.stop()

        try:
            yield show
        finally:
            progress.stop()

    @contextmanager
    def _lines(self, progress: Progress) -> Iterator[None]:
        """A thread prints where the tasks are until the block ends: the work may be busy."""
        has_ended = threading.Event()

        def print_on() -> None:
            while not has_ended.wait(LINE_EVERY_S):
                self._print(progress)

        thread = threading.Thread(target=print_on, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        for task in progress.tasks:
            self.say(_line(task))


class Bar:
    """One line of progress."""

    def __init__(self, progress: Progress, line: TaskID, left: TimeLeft) -> None:
        self._progress, self._line = progress, line
        self.left = left
        """Knows what the bar counts. Work of other kinds is told to it."""

    @property
    def done(self) -> float:
        return self._progress.tasks[self._line].completed

    def advance(self, num: int, *, tokens: int = 0, kind: str = "") -> None:
        """So many more are done, with so many more tokens; `kind` is for the time left."""
        known = self._progress.tasks[self._line].fields["tokens"]
        if num:
            self.left.did(num, kind)
        self._progress.update(self._line, advance=num, tokens=known + tokens)

    def update(
        self,
        *,
        name: str | None = None,
        done: float | None = None,
        total: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """What is not given stays."""
        text = None if name is None else escape(name)
        if done is not None and done != self.done:
            self.left.did(done - self.done)
        self._progress.update(self._line, description=text, completed=done, total=total)
        if total is not None:
            self.left.expect(total - self.done)
        if tokens is not None:
            self._progress.update(self._line, tokens=tokens)


class _TokenRate(ProgressColumn):
    """Tokens per second since the bar started."""

    def render(self, task: Task) -> Text:
        return Text(f"{_rate(task):,.0f} tok/s", style="cyan")


class _TimeLeft(ProgressColumn):
    """The time left, as `TimeLeft` foretells it."""

    def render(self, task: Task) -> Text:
        left = _left_s(task)
        return Text("" if left is None else f"ETA {_clock(left)}", style="cyan")


def _left_s(task: Task) -> float | None:
    left: TimeLeft = task.fields["left"]
    return left.seconds()


def _line(task: Task) -> str:
    """`ga 3  320 of 1,900  412 tok/s  0:32  ETA 1:20`"""
    name = Text.from_markup(task.description).plain
    total = f" of {task.total:,.0f}" if task.total is not None else ""
    parts = [name, f"{task.completed:,.0f}{total}", f"{_rate(task):,.0f} tok/s"]
    parts.append(_clock(task.elapsed or 0.0))
    left = _left_s(task)
    if left is not None:
        parts.append(f"ETA {_clock(left)}")
    return "  ".join(parts)


def _rate(task: Task) -> float:
    """Tokens per second since the task began."""
    elapsed = task.elapsed or 0.0
    return task.fields.get("tokens", 0) / elapsed if elapsed > 0 else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
