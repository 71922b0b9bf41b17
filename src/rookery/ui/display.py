"""Progress on the terminal: lines, notes, progress bars, starting servers.

    display = Display()                       # Display(is_quiet=True) shows nothing
    display.say("loading smollm2")
    with display.bar("founders", total=1900, noun="answer", run=run) as bar:
        bar.update(done=320, tokens=4_100)

Everything goes to stderr. If no bar can be drawn (a pipe, a file, a job's log), its content is
printed as a line every 10 seconds and once at the end. With `run`, it also goes to the run's
`progress.json`, for the page of runs.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
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
from rich.segment import Segment
from rich.text import Text

from rookery.errors import RookeryError
from rookery.runs import Run
from rookery.ui.time_left import PROGRESS, TimeLeft

if TYPE_CHECKING:
    from rookery.fleet import LaunchProgress

__all__ = ["WRITE_EVERY_S", "Bar", "Display", "PlainConsole", "ProgressFile", "every"]

Progressed = tuple[float, float | None, float | None]
"""Units done, their total if known, and the seconds left if known."""

LINE_EVERY_S = 10.0
"""Seconds between two lines of progress in a log."""
WRITE_EVERY_S = 1.0
"""Seconds between two checks whether to write a run's progress file."""
_CONTROLS = (code for code in range(0x20) if chr(code) not in "\n\t")
_TURNS = (0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {code: 0x2400 + code for code in _CONTROLS} | dict.fromkeys(_TURNS, 0xFFFD)
"""Pictures for ASCII control characters, U+FFFD for others and for changes of direction."""
_LINE = 70
"""Last characters of a server's log line that are shown."""


class PlainConsole(Console):
    """Terminal on which no text, such as a name or an error, acts as a command: the escape
    character becomes `␛`, and characters that change the writing direction become `�`."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_text = segment.control is None
            yield segment._replace(text=segment.text.translate(_SHOWN)) if is_text else segment


class Display:
    """Lines and bars on stderr, or nothing at all."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._console = PlainConsole(stderr=True, quiet=is_quiet)

    @property
    def _can_draw(self) -> bool:
        """Whether bars can be drawn. `is_terminal` alone is true of a pipe with FORCE_COLOR."""
        console = self._console
        return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()

    def say(self, line: str) -> None:
        """Print a line about the current work."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def note(self, lines: Iterable[str]) -> None:
        """Print what the reader of a result must know."""
        for line in lines:
            self._console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def hint(self, line: str) -> None:
        """Print a suggestion at a terminal; a log does not get it."""
        if self._console.is_terminal:
            self._console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def fail(self, sentence: str) -> None:
        self._console.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)

    @contextmanager
    def bar(
        self, name: str, *, total: int | None, noun: str = "answer", run: Run | None = None
    ) -> Iterator["Bar"]:
        """Show a bar with counts, tokens per second, elapsed time and time left."""
        can_draw = self._can_draw
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
        left = TimeLeft()
        left.expect(total or 0)
        line = progress.add_task(escape(name), total=total, tokens=0, left=left)
        task = progress.tasks[line]
        with progress, ExitStack() as stack:
            if not self.is_quiet and not can_draw:
                stack.enter_context(every(LINE_EVERY_S, lambda: self.say(_line(task))))
            if run is not None:
                file = ProgressFile(run, noun, lambda: (task.completed, task.total, _left_s(task)))
                stack.enter_context(every(WRITE_EVERY_S, file.write))
            try:
                yield Bar(progress, line, left)
            finally:
                left.end()

    @contextmanager
    def launching(self) -> Iterator[Callable[["LaunchProgress"], None]]:
        """Show a line per starting server; without a terminal, print a line when it is ready."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[line]}", style="dim", markup=False),
            console=self._console,
            transient=True,
            disable=self.is_quiet or not self._can_draw,
        )
        lines: dict[int, TaskID] = {}
        ready: set[int] = set()

        def show(now: "LaunchProgress") -> None:
            if len(ready) == now.num_servers:
                return  # a later restart: the progress bar has the terminal
            text = f"server {now.index + 1} of {now.num_servers}  {now.url}  {now.seconds:4.0f} s"
            if now.index not in lines:
                progress.start()
                lines[now.index] = progress.add_task(text, total=None, line="")
            tail = "".join(c for c in now.line.strip()[-_LINE:] if c.isprintable())
            line = "ready" if now.is_ready else tail
            progress.update(lines[now.index], description=text, line=line)
            if now.is_ready:
                ready.add(now.index)
                if not self._can_draw:
                    self.say(f"{text}  ready")
            if len(ready) == now.num_servers:
                progress.stop()

        try:
            yield show
        finally:
            progress.stop()


@contextmanager
def every(seconds: float, work: Callable[[], None]) -> Iterator[None]:
    """Call `work` at this interval and once at the end, in a thread: the caller may be busy."""
    has_ended = threading.Event()

    def repeat() -> None:
        while not has_ended.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        work()


class ProgressFile:
    """Reports the progress of a run to the page. A file that cannot be written is ignored."""

    def __init__(self, run: Run, noun: str, look: Callable[[], Progressed]) -> None:
        self._run, self._noun, self._look = run, noun, look
        self._written: tuple[float, float | None] | None = None
        self._written_s = 0.0
        self._had_left = False
        """Whether the last write had a time left."""

    def write(self) -> None:
        """Write changed counts, and the time left alone at most every LINE_EVERY_S."""
        done, total, left_s = self._look()
        now, counts, has_left = time.time(), (done, total), left_s is not None
        is_soon = not has_left or now < self._written_s + LINE_EVERY_S
        if counts == self._written and has_left == self._had_left and is_soon:
            return
        document = {"done": done, "total": total, "noun": self._noun, "left_s": left_s}
        with suppress(RookeryError):
            self._run.write_json(PROGRESS, {**document, "time_s": now})
            self._written, self._written_s, self._had_left = counts, now, has_left


class Bar:
    def __init__(self, progress: Progress, line: TaskID, left: TimeLeft) -> None:
        self._progress, self._line = progress, line
        self.left = left
        """Counts the units of the bar. Callers report other kinds of work to it."""

    @property
    def done(self) -> float:
        return self._progress.tasks[self._line].completed

    def advance(self, num: int, *, tokens: int = 0, worth: float = 1.0) -> None:
        """Add finished units and their tokens. `worth` is the weight of a unit in the time left."""
        known = self._progress.tasks[self._line].fields["tokens"]
        if num:
            self.left.did(num * worth)
        self._progress.update(self._line, advance=num, tokens=known + tokens)

    def skip(self, num: int) -> None:
        """Reduce the total by units that will not be done."""
        total = self._progress.tasks[self._line].total
        if num and total is not None:
            self.update(total=total - num)

    def update(
        self,
        *,
        name: str | None = None,
        done: float | None = None,
        total: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Set the given values; the others stay."""
        text = None if name is None else escape(name)
        if done is not None and done != self.done:
            self.left.did(done - self.done)
        self._progress.update(self._line, description=text, completed=done, total=total)
        if total is not None:
            self.left.expect(total - self.done)
        if tokens is not None:
            self._progress.update(self._line, tokens=tokens)


class _TokenRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{_rate(task):,.0f} tok/s", style="cyan")


class _TimeLeft(ProgressColumn):
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
    elapsed = task.elapsed or 0.0
    return task.fields.get("tokens", 0) / elapsed if elapsed > 0 else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
