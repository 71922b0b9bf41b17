"""Programs of a run as blobs, by id: the search keeps numbers in memory, texts stay on disk.

    digest = store.put(program)
    store.add("p7", digest)
    store.get("p7").code

`put` and `get` wait for the disk: call them in a thread.
"""

import json
import logging
import queue
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from rookery.errors import RunError, boundary
from rookery.loops.evolve.checkpoints import (
    ProgramFile,
    program_document,
    read_artifacts,
)
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.program import ProgramRecord
from rookery.runs import BlobStore

__all__ = [
    "ProgramStore",
    "has_large",
    "keep_artifacts",
    "log_to_file",
]

# `logs/` of a run: what Rookery logs while it evolves, in a file as OpenEvolve keeps one.
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


NUM_CACHED = 256
"""Programs in memory: the parents, inspirations and best of the islands come up again."""


class ProgramStore:
    """Usable from several threads."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._digests: dict[str, str] = {}
        self._read = lru_cache(maxsize=NUM_CACHED)(self._read_blob)

    def put(self, program: ProgramRecord) -> str:
        """Store a program and return its digest."""
        document = program_document(program, small=program.artifacts, artifact_dir=None)
        return self.put_document(document)

    def path(self, id: str) -> Path:
        """The file with the program's document, as checkpoints have it."""
        return self._blobs.path(self._digests[id])

    def put_document(self, document: Mapping[str, object]) -> str:
        return self._blobs.put_bytes(json.dumps(document, sort_keys=True).encode())

    def get_document(self, digest: str) -> dict[str, str]:
        document: dict[str, str] = json.loads(self._blobs.read_bytes(digest))
        return document

    def add(self, id: str, digest: str) -> None:
        """Let a program be found by its id."""
        self._digests[id] = digest

    def get(self, id: str) -> ProgramRecord:
        return self._read(self._digests[id])

    def get_whole(self, id: str) -> ProgramRecord:
        """With its prompts, which are for checkpoints and longer than all the rest."""
        return self._read_file(self._digests[id])

    def _read_blob(self, digest: str) -> ProgramRecord:
        return replace(self._read_file(digest), prompts={})

    def _read_file(self, digest: str) -> ProgramRecord:
        file = ProgramFile.model_validate_json(self._blobs.read_bytes(digest))
        return file.record(island=None, artifacts=read_artifacts(file.artifacts_json, None))


def keep_artifacts(
    artifacts: Mapping[str, str | bytes], *, max_bytes: int
) -> dict[str, str | bytes]:
    """The artifacts that fit, in their order; those left out are named in one of their own."""
    kept: dict[str, str | bytes] = {}
    left_out, num_bytes = [], 0
    for name, value in artifacts.items():
        size = _num_bytes(value)
        if num_bytes + size > max_bytes:
            left_out.append(f"{name} ({size} bytes)")
            continue
        kept[name] = value
        num_bytes += size
    if left_out:
        kept["left_out"] = f"Over evaluator.max_artifact_storage: {', '.join(left_out)}"[:1000]
    return kept


def has_large(artifacts: Mapping[str, str | bytes], *, max_bytes: int) -> bool:
    """Whether one of them is larger than that."""
    return any(_num_bytes(value) > max_bytes for value in artifacts.values())


def _num_bytes(value: str | bytes) -> int:
    return len(value.encode(errors="replace")) if isinstance(value, str) else len(value)
