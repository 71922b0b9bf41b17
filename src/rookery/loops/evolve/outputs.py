"""The files of an evolution for people and other programs: `best/`, `checkpoints/`, trace, `logs/`.

    async with open_outputs(parts...) as outputs:
        due = outputs.find_due(member, is_best=True, is_new=True)      # when it is told
        await outputs.write(due)                                       # when that is durable

A thread writes them in the order of tells. The evolution waits only if more than QUEUE are due.
After a crash, files that may be missing are written again.
"""

import asyncio
import logging
import queue
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Protocol

from rookery.errors import RunError, boundary
from rookery.loops.evolve.config import EvolveConfig, TraceConfig
from rookery.loops.evolve.problem import FirstProgram, suffix_of
from rookery.loops.evolve.program import ProgramRecord, ProgramStore
from rookery.loops.evolve.prompts import Prompt
from rookery.loops.evolve.search_state import SearchState
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread, task_group
from rookery.search.programs.database import DatabaseState
from rookery.search.programs.program import Member

__all__ = [
    "ChildStep",
    "Due",
    "FeatureRange",
    "OutputFormat",
    "Outputs",
    "ProgramCheckpoint",
    "Trace",
    "WriteOptions",
    "log_to_file",
    "open_outputs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRange:
    """Range of a feature dimension. The grid's bins divide it."""

    min: float
    max: float
    values: tuple[float, ...] = ()
    """The latest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheckpoint:
    """A population at one iteration. Lists over islands have one entry per island."""

    programs: Sequence[ProgramRecord]
    islands: Sequence[Sequence[str]]
    """Program ids per island."""
    grids: Sequence[Mapping[str, str]]
    """Program ids by cell, per island. The cell "3-7" has one bin number per feature dimension."""
    archive: Sequence[str] = ()
    best_id: str | None = None
    island_best_ids: Sequence[str | None] = ()
    iteration: int = 0
    """Last iteration included."""
    current_island: int = 0
    island_generations: Sequence[int] = ()
    last_migration_generation: int = 0
    feature_ranges: Mapping[str, FeatureRange] = field(default_factory=dict)

    @property
    def best(self) -> ProgramRecord | None:
        """The best program, if one is named."""
        return next((p for p in self.programs if p.id == self.best_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for writing a checkpoint."""

    suffix: str = ".py"
    """Suffix of the best program's file."""
    other_files: Mapping[str, str] = field(default_factory=dict)
    """Files of a folder that stay unchanged beside the program's files."""
    saved_at: float
    """Current time, in seconds since 1970."""
    with_prompts: bool = True
    max_inline_bytes: int = 32 * 1024
    """Larger artifacts get separate files (`database.artifact_size_threshold`)."""
    earlier: Path | None = None
    """An earlier checkpoint of the same run. Programs found there are hard-linked, not copied: most
    of a population does not change between checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStep:
    """One iteration that gave a child."""

    parent: ProgramRecord
    child: ProgramRecord
    prompt: Prompt | None = None
    answer: str | None = None


class Trace(Protocol):
    """A file of steps, each child once. After a crash, steps that may be missing are appended."""

    def append(self, step: ChildStep) -> None: ...

    def close(self) -> None: ...


class OutputFormat(Protocol):
    """File format of programs and populations.

    A function fills a new, empty folder. The caller publishes it atomically.
    """

    def fill_best(self, folder: Path, program: ProgramRecord, *, options: WriteOptions) -> None: ...

    def fill_checkpoint(
        self,
        folder: Path,
        checkpoint: ProgramCheckpoint,
        *,
        place: Path,
        options: WriteOptions,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        """`place` is the folder's final path. `files` maps programs to their documents."""
        ...

    def list_checkpoints(self, folder: Path) -> list[Path]:
        """Return the checkpoints of a run, by iteration."""
        ...

    def open_trace(self, output: Path, *, config: TraceConfig) -> Trace: ...


QUEUE = 64
NEW_SHARE = 0.05
"""Minimum share of new programs in a checkpoint, because it names every program. It delays a
checkpoint only if the population exceeds 20 checkpoint intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceEntry:
    id: str
    parent: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """A snapshot of the population for a checkpoint."""

    iteration: int
    database: DatabaseState
    best: str
    large: set[str]
    """Programs with an artifact that gets a separate file."""


_Item = _TraceEntry | _Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Files due after one decision, with the population at that time."""

    is_new: bool
    is_best: bool = False
    traced: _TraceEntry | None = None
    checkpoint: _Checkpoint | None = None


class Outputs:
    """Writes the files of one search, in tasks of `open_outputs`."""

    def __init__(
        self,
        config: EvolveConfig,
        *,
        run: Run,
        store: ProgramStore,
        state: SearchState,
        first: FirstProgram | ProgramRecord,
        output_format: OutputFormat,
    ) -> None:
        self._config = config
        self._run = run
        self._store = store
        self._state = state
        self._format = output_format
        self._suffix = suffix_of(first.language)
        self._other_files: Mapping[str, str] = {}
        if isinstance(first, FirstProgram):
            self._suffix, self._other_files = first.suffix, first.other_files
        self._num_at_checkpoint = state.num_decided
        self._trace: Trace | None = None
        self._earlier: Path | None = None
        """Previous checkpoint, once it was looked up."""
        # Set by `write`, `note_resumed` and `close`. Cleared by `write_bests`.
        self._is_best_due = asyncio.Event()
        self._is_closed = False
        # Filled by `write`, `note_resumed` and `close`, drained by `write_all`. Blocks when full.
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue(maxsize=QUEUE)
        self._unconfirmed: deque[_TraceEntry] = deque(
            maxlen=QUEUE + config.evolution_trace.buffer_size + 1
        )
        """Latest programs told by an earlier process, whose trace lines may be missing."""

    def find_due(self, member: Member | None, *, is_best: bool, is_new: bool) -> Due:
        """Return the files due after a decision. `is_new` is false if it was made earlier."""
        has_trace = member is not None and self._config.evolution_trace.enabled
        return Due(
            is_new=is_new,
            is_best=is_best,
            traced=self._traced(member) if member is not None and has_trace else None,
            checkpoint=self._checkpoint_now() if self._is_checkpoint_due() else None,
        )

    def _is_checkpoint_due(self) -> bool:
        num_decided = self._state.num_decided
        if num_decided % self._config.checkpoint_interval:
            return False
        num_new = num_decided - self._num_at_checkpoint
        if num_new < NEW_SHARE * len(self._state.database.members):
            return False
        self._num_at_checkpoint = num_decided
        return True

    async def write(self, due: Due) -> None:
        """Schedule the due files that are not written yet."""
        if due.is_new and due.is_best:
            self._is_best_due.set()
        if due.traced is not None and due.is_new:
            await self._queue.put(due.traced)
        elif due.traced is not None:
            self._unconfirmed.append(due.traced)
        if due.checkpoint is not None:
            await self._write_later(due.checkpoint)

    async def ensure_best(self) -> None:
        """Write `best/` from the first program, before any model is asked."""
        if not (self._run.path / "best").exists():
            await self.write_best()

    async def note_resumed(self) -> None:
        """Write what may be missing, once all recorded decisions were replayed."""
        self._is_best_due.set()
        while self._unconfirmed:
            await self._queue.put(self._unconfirmed.popleft())

    def _traced(self, member: Member) -> _TraceEntry:
        ancestor = self._state.ancestors[member.id]
        assert ancestor.parent is not None
        return _TraceEntry(id=member.id, parent=ancestor.parent, answer=ancestor.answer)

    async def _write_later(self, checkpoint: _Checkpoint) -> None:
        name = f"checkpoint_{checkpoint.iteration}"
        if not (self._run.path / "checkpoints" / name).exists():
            await self._queue.put(checkpoint)

    def _checkpoint_now(self) -> _Checkpoint:
        state = self._state.database.state
        ids = [member.id for member in state.population.members]
        return _Checkpoint(
            iteration=self._state.num_decided,
            database=state,
            best=self._state.best.id,
            large={id for id in ids if self._state.ancestors[id].has_large_artifacts},
        )

    async def close(self) -> None:
        """Queue a final checkpoint and end the writers."""
        self._is_closed = True
        self._is_best_due.set()
        await self._write_later(self._checkpoint_now())
        await self._queue.put(None)

    async def write_bests(self) -> None:
        """Keep `best/` up to date until `close`, apart from slow checkpoints."""
        while self._is_best_due.is_set() or not self._is_closed:
            await self._is_best_due.wait()
            self._is_best_due.clear()
            await self.write_best()

    async def write_best(self) -> None:
        """Write `best/` with the current winner."""
        program = await run_in_thread(self._store.get, self._state.winner)
        options = self._options()
        await run_in_thread(
            self._run.write_folder,
            "best",
            lambda folder: self._format.fill_best(folder, program, options=options),
        )

    async def write_all(self) -> None:
        """Write queued items until `close`."""
        if self._config.evolution_trace.enabled:
            self._trace = await run_in_thread(
                self._format.open_trace, self._run.path, config=self._config.evolution_trace
            )
        try:
            while (item := await self._queue.get()) is not None:
                await run_in_thread(self._write, item)
        finally:
            if self._trace is not None:
                await run_in_thread(self._trace.close)

    def _write(self, item: _Item) -> None:
        match item:
            case _TraceEntry() if self._trace is not None:
                self._trace.append(self._step(item))
            case _Checkpoint():
                self._write_checkpoint(item)

    def _options(self) -> WriteOptions:
        return WriteOptions(
            suffix=self._suffix,
            other_files=self._other_files,
            saved_at=time.time(),
            with_prompts=self._config.database.log_prompts,
            max_inline_bytes=self._config.database.artifact_size_threshold,
        )

    def _step(self, item: _TraceEntry) -> ChildStep:
        step = ChildStep(parent=self._store.get(item.parent), child=self._store.get(item.id))
        if item.answer:  # tuned programs have no answer
            kept = self._store.get_document(item.answer)
            prompt = Prompt(system=kept["system"], user=kept["user"], template=kept["template"])
            step = replace(step, prompt=prompt, answer=kept["answer"])
        return step

    def _write_checkpoint(self, due: _Checkpoint) -> None:
        name = f"checkpoints/checkpoint_{due.iteration}"
        place = self._run.path / name
        ids = [member.id for member in due.database.population.members]
        files = {id: self._store.path(id) for id in ids if id not in due.large}
        checkpoint = self._checkpoint(due)
        earlier = self._earlier or next(
            reversed(self._format.list_checkpoints(self._run.path)), None
        )
        options = replace(self._options(), earlier=earlier)
        self._run.write_folder(
            name,
            lambda folder: self._format.fill_checkpoint(
                folder, checkpoint, place=place, options=options, files=files
            ),
        )
        self._earlier = place

    def _checkpoint(self, due: _Checkpoint) -> ProgramCheckpoint:
        population = due.database.population
        members = {member.id: member for member in population.members}
        bests = [
            min(island.members, key=lambda id: members[id].rank, default=None)
            for island in population.islands
        ]
        return ProgramCheckpoint(
            programs=[self._store.get_whole(id) for id in (due.best, *due.large - {due.best})],
            islands=[island.members for island in population.islands],
            grids=[island.cells for island in population.islands],
            archive=population.archive,
            best_id=due.best,
            island_best_ids=bests,
            iteration=due.iteration,
            island_generations=[island.num_children for island in population.islands],
            last_migration_generation=population.last_migration,
            feature_ranges={
                name: FeatureRange(min=low, max=high)
                for name, (low, high) in population.bounds.items()
            },
        )


@asynccontextmanager
async def open_outputs(outputs: Outputs) -> AsyncIterator[Outputs]:
    """Write in the background. At the end of the block, everything is written."""
    async with task_group() as group:
        group.create_task(outputs.write_all(), name="outputs")
        group.create_task(outputs.write_bests(), name="best")
        yield outputs
        await outputs.close()


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and cursor moves. Other control characters are dropped one by one."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _PlainFormatter(logging.Formatter):
    """Drops terminal escapes and control characters that programs or servers wrote."""

    def format(self, record: logging.LogRecord) -> str:
        text = _ESCAPES.sub("", super().format(record))
        return "".join(char for char in text if char.isprintable() or char in "\n\t")


@contextmanager
def log_to_file(config: EvolveConfig, folder: Path) -> Iterator[Path]:
    """Append log lines from `log_level` on to `evolve.log` in `logs/` or `log_dir`. A thread
    writes, so the event loop does not wait for the file."""
    place = Path(config.log_dir) if config.log_dir else folder / "logs"
    with boundary(RunError, f"Opening the log in {place}", foreign=(OSError,)):
        place.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(place / "evolve.log", encoding="utf-8")
    file.setFormatter(_PlainFormatter(FORMAT))
    # Filled by all loggers, drained by the listener's thread.
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener, handler = QueueListener(lines, file), QueueHandler(lines)
    logger = logging.getLogger("rookery")
    level = logger.level
    handler.setLevel(config.log_level)
    logger.addHandler(handler)
    logger.setLevel(min(logging.getLevelName(config.log_level), logger.getEffectiveLevel()))
    listener.start()
    try:
        yield place / "evolve.log"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        listener.stop()
        file.close()
