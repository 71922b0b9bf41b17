"""The files of an evolution for people and other programs: `best/`, `checkpoints/`, trace, `logs/`.

    async with open_outputs(parts...) as outputs:
        due = outputs.find_due(member, is_best=True, is_new=True)      # when it is told
        await outputs.write(due)                                       # when that is durable

Written in a thread, in the order in which programs were told; the evolution waits only when more
than QUEUE of them are due. After a crash what may be missing is written again.
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

from rookery.concurrency import run_in_thread, task_group
from rookery.errors import RunError, boundary
from rookery.loops.evolve.config import EvolveConfig, TraceConfig
from rookery.loops.evolve.problem import FirstProgram, suffix_of
from rookery.loops.evolve.program import ProgramRecord, ProgramStore
from rookery.loops.evolve.prompts import Prompt
from rookery.loops.evolve.search_state import SearchState
from rookery.runs import Run
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

# What is written, as values; how, an OutputFormat says.


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRange:
    """What was seen of a feature dimension; the grid's bins are cut from it."""

    min: float
    max: float
    values: tuple[float, ...] = ()
    """The latest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheckpoint:
    """Programs, and which of them stand where. Lists over islands have one entry per island."""

    programs: Sequence[ProgramRecord]
    islands: Sequence[Sequence[str]]
    """Ids per island."""
    grids: Sequence[Mapping[str, str]]
    """Per island: cell ("3-7": one bin per feature dimension) to id."""
    archive: Sequence[str] = ()
    best_id: str | None = None
    island_best_ids: Sequence[str | None] = ()
    iteration: int = 0
    """The last iteration that is in it."""
    current_island: int = 0
    island_generations: Sequence[int] = ()
    last_migration_generation: int = 0
    feature_ranges: Mapping[str, FeatureRange] = field(default_factory=dict)

    @property
    def best(self) -> ProgramRecord | None:
        """The best program, where one is named."""
        return next((p for p in self.programs if p.id == self.best_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a checkpoint is written."""

    suffix: str = ".py"
    """Of the best program's file."""
    other_files: Mapping[str, str] = field(default_factory=dict)
    """Of a folder: what stands unchanged beside the program's files."""
    saved_at: float
    """Now, in seconds since 1970."""
    with_prompts: bool = True
    max_inline_bytes: int = 32 * 1024
    """Larger artifacts get files of their own (`database.artifact_size_threshold`)."""
    earlier: Path | None = None
    """A checkpoint of the same run. Programs that it has get a second name, not a second copy: most
    of a population was in the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStep:
    """One iteration that gave a child."""

    parent: ProgramRecord
    child: ProgramRecord
    prompt: Prompt | None = None
    answer: str | None = None


class Trace(Protocol):
    """A file of steps, each child once: what may be missing after a crash is appended again."""

    def append(self, step: ChildStep) -> None: ...

    def close(self) -> None: ...


class OutputFormat(Protocol):
    """How programs and populations stand in files.

    A function fills a folder that is new and empty; whoever calls it makes that whole or absent.
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
        """`place` is the path at which the folder will stand, `files` has programs as documents."""
        ...

    def list_checkpoints(self, folder: Path) -> list[Path]:
        """The checkpoints of a run, by iteration."""
        ...

    def open_trace(self, output: Path, *, config: TraceConfig) -> Trace: ...


# What of it is due, and when it is written.


QUEUE = 64
NEW_SHARE = 0.05
"""A checkpoint names every program, so it waits until this share of them is new. Only populations
of more than 20 checkpoint intervals are that large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    id: str
    parent: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """A checkpoint of the population as it was."""

    iteration: int
    database: DatabaseState
    best: str
    large: set[str]
    """Programs with an artifact that gets a file of its own."""


_Item = _Traced | _Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What one decision asks of the files, with the population as it was then."""

    is_new: bool
    is_best: bool = False
    traced: _Traced | None = None
    checkpoint: _Checkpoint | None = None


class Outputs:
    """Made by `open_outputs`."""

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
        """The checkpoint before, once it was looked for."""
        # Set by `note` and `close`, cleared by `write_bests`, which writes what is the best then.
        self._is_best_due = asyncio.Event()
        self._is_closed = False
        # Filled by `note`, drained by `write_all`; a full queue makes the evolution wait.
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue(maxsize=QUEUE)
        self._again: deque[_Traced] = deque(maxlen=QUEUE + config.evolution_trace.buffer_size + 1)
        """The last programs that an earlier session told: their lines may be missing."""

    def find_due(self, member: Member | None, *, is_best: bool, is_new: bool) -> Due:
        """A decision was told; `member` is its program. Not `is_new`: an earlier session did."""
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
        """Have it written, as far as it is not yet."""
        if due.is_new and due.is_best:
            self._is_best_due.set()
        if due.traced is not None and due.is_new:
            await self._queue.put(due.traced)
        elif due.traced is not None:
            self._again.append(due.traced)
        if due.checkpoint is not None:
            await self._write_later(due.checkpoint)

    async def ensure_best(self) -> None:
        """There is a best program from the first one on, before any model is asked."""
        if not (self._run.path / "best").exists():
            await self.write_best()

    async def note_resumed(self) -> None:
        """All that earlier sessions told was told again."""
        self._is_best_due.set()
        while self._again:
            await self._queue.put(self._again.popleft())

    def _traced(self, member: Member) -> _Traced:
        ancestor = self._state.ancestors[member.id]
        assert ancestor.parent is not None
        return _Traced(id=member.id, parent=ancestor.parent, answer=ancestor.answer)

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
        """A checkpoint of the end, then wait until all is written."""
        self._is_closed = True
        self._is_best_due.set()
        await self._write_later(self._checkpoint_now())
        await self._queue.put(None)

    async def write_bests(self) -> None:
        """Until `close`, and what is due then. Apart from the rest: a checkpoint may take
        seconds."""
        while self._is_best_due.is_set() or not self._is_closed:
            await self._is_best_due.wait()
            self._is_best_due.clear()
            await self.write_best()

    async def write_best(self) -> None:
        """`best/` with the winner as it is known now."""
        program = await run_in_thread(self._store.get, self._state.winner)
        options = self._options()
        await run_in_thread(
            self._run.write_folder,
            "best",
            lambda folder: self._format.fill_best(folder, program, options=options),
        )

    async def write_all(self) -> None:
        """Until `close`."""
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
            case _Traced() if self._trace is not None:
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

    def _step(self, item: _Traced) -> ChildStep:
        step = ChildStep(parent=self._store.get(item.parent), child=self._store.get(item.id))
        if item.answer:  # tuned numbers are nobody's answer
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
    """Write in the background; when the block ends all is written."""
    async with task_group() as group:
        group.create_task(outputs.write_all(), name="outputs")
        group.create_task(outputs.write_bests(), name="best")
        yield outputs
        await outputs.close()


# `logs/` of a run: what Rookery logs while it evolves, in a file of its own.
#
# with log_to_file(config, run.path):
#     ...
#
# A thread writes: the event loop does not wait for the file. What programs and servers wrote cannot
# colour or move the terminal of whoever reads it.


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and moves of the cursor; of other sequences the control characters go."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _PlainFormatter(logging.Formatter):
    """Without terminal escapes and other control characters."""

    def format(self, record: logging.LogRecord) -> str:
        text = _ESCAPES.sub("", super().format(record))
        return "".join(char for char in text if char.isprintable() or char in "\n\t")


@contextmanager
def log_to_file(config: EvolveConfig, folder: Path) -> Iterator[Path]:
    """Append to `logs/evolve.log`, or to the folder of `log_dir`, from `log_level` on."""
    place = Path(config.log_dir) if config.log_dir else folder / "logs"
    with boundary(RunError, f"Opening the log in {place}", foreign=(OSError,)):
        place.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(place / "evolve.log", encoding="utf-8")
    file.setFormatter(_PlainFormatter(FORMAT))
    # Filled by whoever logs, drained by the listener's thread.
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
