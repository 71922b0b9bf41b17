"""A program with its metrics and lineage: its files, its document, its blob."""

import base64
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rookery.errors import ConfigError
from rookery.paths import expanded
from rookery.runs import BlobStore

__all__ = [
    "SOURCE",
    "Metrics",
    "ProgramDocument",
    "ProgramRecord",
    "ProgramStore",
    "find_file_problem",
    "find_fitness",
    "has_large",
    "is_number",
    "join_files",
    "keep_artifacts",
    "named_file",
    "pack_vector",
    "program_document",
    "read_artifacts",
    "read_other_files",
    "read_program",
    "split_files",
    "unpack_vector",
]

# A program of several files is one text, with a header line per file:
#
#     --- file: solver/search.py ---
#     ...
#     --- file: solver/moves.py ---
#     ...
#
# Prompts show this text, checkpoints store it as `code`, and length limits count it. In an answer,
# a line that names a file (`solver/moves.py`) before a block assigns the block to that file.


_HEADER = re.compile(r"^--- file: (\S.*) ---$", re.MULTILINE)
_MARKER_WORD = "EVOLVE-BLOCK-START"


def join_files(files: Mapping[str, str]) -> str:
    """Join files into one text, sorted by name. `split_files` is the inverse."""
    if problem := find_file_problem(files):
        raise ValueError(problem)
    return "\n".join(f"--- file: {name} ---\n{files[name]}" for name in sorted(files))


def split_files(code: str) -> dict[str, str]:
    """Return file names and texts; empty for a program of one file."""
    if not _HEADER.match(code):
        return {}
    _, *pieces = _HEADER.split(code)
    names, texts = pieces[::2], pieces[1::2]
    last = len(names) - 1
    return {
        name: text[1:] if index == last else text[1:-1]
        for index, (name, text) in enumerate(zip(names, texts, strict=True))
    }


def find_file_problem(files: Mapping[str, str]) -> str | None:
    """Return why these files cannot be joined or must not be written, or None."""
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\n" in name:
            return f"The file name {name!r} leads out of the program's folder."
        if name != name.strip() or name.endswith(" ---"):
            return f"The file name {name!r} cannot stand in a header line."
        if match := _HEADER.search(text):
            return f"{name} has the line {match[0]!r}, which separates files: change that line."
    return None if files else "There is no file."


def named_file(text: str, names: Iterable[str]) -> str | None:
    """Return the file named by the last line with words, ignoring Markdown around the name."""
    lines = [line for line in text.splitlines() if re.search(r"\w", line.strip("`"))]
    lines = [line for line in lines if not re.fullmatch(r"```[\w+#.-]*\s*", line.strip())]
    if not lines:
        return None
    word = re.sub(r"(?i)^\W*(?:file(?:name)?\b\W*)?", "", lines[-1])
    word = word.rstrip(" \t\r`*:)]-")
    return next((name for name in names if word == name or word == f"./{name}"), None)


def read_program(path: Path) -> str:
    """Read a program file or folder. From a folder, takes the files with markers, else all."""
    if expanded(path).is_file():
        return _read_text(path)
    if not path.is_dir():
        raise ConfigError(f"There is no program {path}: give a file or a folder.")
    texts = dict(_folder_texts(path))
    marked = {name: text for name, text in texts.items() if _MARKER_WORD in text}
    if problem := find_file_problem(marked or texts):
        raise ConfigError(f"The program folder {path}: {problem}")
    return join_files(marked or texts)


def read_other_files(path: Path) -> dict[str, str]:
    """Return a folder's files outside the program: those without markers, if others have some."""
    texts = dict(_folder_texts(path)) if path.is_dir() else {}
    others = {name: text for name, text in texts.items() if _MARKER_WORD not in text}
    return others if len(others) < len(texts) else {}


def _folder_texts(folder: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not path.is_symlink() and not is_hidden and not _is_binary(path):
            yield "/".join(parts), _read_text(path)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The program {path} cannot be read as UTF-8 text: {error}") from error


Metrics = Mapping[str, Any]
"""Metrics of an evaluator: numbers and any other values."""


SOURCE = "before_tables"
"""Entry of `metadata` that holds a program's `source`, if that is not its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """One program with its evaluation.

    ProgramRecord(id="7f3c", code="x = 2", parent_id="12ab", generation=1, iteration=9,
                  metrics={"combined_score": 0.7}, island=2)
    """

    id: str
    code: str
    """Text of the program; for a folder, the joined text of its `files`."""
    language: str = "python"
    parent_id: str | None = None
    generation: int = 0
    iteration: int = 0
    """The iteration that gave it; 0 for a first program."""
    timestamp: float = 0.0
    """Creation time, in seconds since 1970."""
    metrics: Metrics = field(default_factory=dict)
    island: int | None = None
    changes: str = ""
    """Summary of the edits to its parent."""
    changes_description: str = ""
    """The model's description of all changes so far (`prompt.programs_as_changes_description`)."""
    parent_metrics: Metrics = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the document's `metadata`, such as `migrant` and `token_usage`."""
    artifacts: Mapping[str, str | bytes] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Prompts by template name, each as {system, user, responses}."""
    embedding: tuple[float, ...] | None = None

    @property
    def source(self) -> str:
        """The program as a model is shown it: before tuning wrote out functions as tables."""
        return str(self.metadata.get(SOURCE) or self.code)

    @property
    def files(self) -> dict[str, str]:
        """File names and texts of a folder; empty for a program of one file."""
        return split_files(self.code)


def find_fitness(metrics: Metrics, *, feature_dimensions: Collection[str] = ()) -> float | None:
    """Return `combined_score`, else the mean of the numbers that are not feature dimensions, as
    OpenEvolve does.

    If all numbers are feature dimensions, returns the mean of all. Means skip booleans and NaN.
    Returns None without numbers, or if combined_score is NaN.
    """
    if "combined_score" in metrics:
        with suppress(TypeError, ValueError):
            score = float(metrics["combined_score"])
            return None if math.isnan(score) else score
    numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
    scores = [value for name, value in numbers.items() if name not in feature_dimensions]
    scores = scores or list(numbers.values())
    return sum(scores) / len(scores) if scores else None


def is_number(value: object) -> bool:
    """Return True for a comparable number: not a boolean, text or NaN."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and not math.isnan(value)  # type: ignore[arg-type]


_DTYPE = np.dtype("<f4")


def pack_vector(vector: Sequence[float]) -> str:
    """Encode a vector as text, exact to 32 bits, for use in an event.

        unpack_vector(pack_vector((0.25, -1.5)))    # (0.25, -1.5)

    Base64 of 4 bytes per number: 1,536 numbers take 8 KiB, a quarter of JSON. Raises ValueError if
    the vector has no direction: it is empty, all 0 or not finite.
    """
    with np.errstate(over="ignore"):
        numbers = np.array(vector, dtype=_DTYPE)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or not numbers.any():
        raise ValueError(
            f"Got a vector of shape {numbers.shape} without a direction: it needs finite numbers "
            "that are not all 0."
        )
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def unpack_vector(text: str) -> tuple[float, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), dtype=_DTYPE).tolist())


_OWN = ("changes", "parent_metrics", "island")
"""Entries of the document's `metadata` that are fields of a ProgramRecord."""


class ProgramDocument(BaseModel):
    """The document of a program, as blobs and checkpoints store it. Unknown entries are ignored."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Also a file name, so it contains no path."""
    code: str
    changes_description: str | None = None
    language: str | None = None
    parent_id: str | None = None
    generation: int = 0
    timestamp: float = 0.0
    iteration_found: int = 0
    metrics: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    prompts: dict[str, Any] | None = None
    artifacts_json: str | None = None
    artifact_dir: str | None = None
    embedding: tuple[float, ...] | None = None

    def record(self, *, island: int | None, artifacts: Mapping[str, str | bytes]) -> ProgramRecord:
        """Convert to a record. `island` takes precedence over the island of the metadata."""
        island_value = self.metadata.get("island")
        own_island = (
            island_value
            if isinstance(island_value, int) and not isinstance(island_value, bool)
            else None
        )
        parent_metrics = self.metadata.get("parent_metrics")
        return ProgramRecord(
            id=self.id,
            code=self.code,
            language=self.language or "unknown",
            parent_id=self.parent_id,
            generation=self.generation,
            iteration=self.iteration_found,
            timestamp=self.timestamp,
            metrics=self.metrics,
            island=own_island if island is None else island,
            changes=str(self.metadata.get("changes") or ""),
            changes_description=self.changes_description or "",
            parent_metrics=parent_metrics if isinstance(parent_metrics, dict) else {},
            metadata={key: value for key, value in self.metadata.items() if key not in _OWN},
            artifacts=artifacts,
            prompts=self.prompts or {},
            embedding=self.embedding,
        )


def program_document(
    program: ProgramRecord, *, small: Mapping[str, str | bytes], artifact_dir: Path | None
) -> dict[str, Any]:
    """Build the document. It contains the small artifacts; large ones have their own folder."""
    fields = {
        "changes": program.changes or None,
        "parent_metrics": dict(program.parent_metrics) or None,
        "island": program.island,
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    return {
        "id": program.id,
        "code": program.code,
        "changes_description": program.changes_description,
        "language": program.language,
        "parent_id": program.parent_id,
        "generation": program.generation,
        "timestamp": program.timestamp,
        "iteration_found": program.iteration,
        "metrics": dict(program.metrics),
        "complexity": float(len(program.code)),
        "metadata": {**program.metadata, **kept},
        "prompts": dict(program.prompts) or None,
        "artifacts_json": json.dumps(small, default=_encode_bytes) if small else None,
        "artifact_dir": str(artifact_dir) if artifact_dir else None,
        "embedding": list(program.embedding) if program.embedding is not None else None,
    }


def read_artifacts(text: str | None, folder: Path | None) -> dict[str, str | bytes]:
    """Read the artifacts of a document and its folder. Binary files are bytes."""
    loaded = json.loads(text) if text else {}
    entries = loaded if isinstance(loaded, dict) else {}
    artifacts = {name: _decode(value) for name, value in entries.items()}
    for path in sorted(folder.iterdir()) if folder else ():
        if path.is_file() and not path.is_symlink():
            artifacts[path.name] = _as_text(path.read_bytes())
    return artifacts


def _encode_bytes(value: object) -> dict[str, str]:
    assert isinstance(value, bytes)
    return {"__bytes__": base64.b64encode(value).decode()}


def _decode(value: object) -> str | bytes:
    if isinstance(value, dict) and list(value) == ["__bytes__"]:
        return base64.b64decode(value["__bytes__"])
    return value if isinstance(value, str) else json.dumps(value)


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


NUM_CACHED = 256
"""Programs cached in memory: parents, inspirations and the best are needed again."""


class ProgramStore:
    """The programs of a run as blobs, by id. Numbers stay in memory, texts on disk. Thread-safe.

        digest = store.put(program)
        store.add("p7", digest)
        store.get("p7").code

    `put` and `get` wait for the disk: call them in a thread.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._digests: dict[str, str] = {}
        self._read = lru_cache(maxsize=NUM_CACHED)(self._read_blob)

    def put(self, program: ProgramRecord) -> str:
        """Store a program and return its digest."""
        document = program_document(program, small=program.artifacts, artifact_dir=None)
        return self.put_document(document)

    def path(self, id: str) -> Path:
        """Return the path of the program's document."""
        return self._blobs.path(self._digests[id])

    def put_document(self, document: Mapping[str, object]) -> str:
        return self._blobs.put_bytes(json.dumps(document, sort_keys=True).encode())

    def get_document(self, digest: str) -> dict[str, str]:
        document: dict[str, str] = json.loads(self._blobs.read_bytes(digest))
        return document

    def add(self, id: str, digest: str) -> None:
        """Register a program's digest under its id."""
        self._digests[id] = digest

    def get(self, id: str) -> ProgramRecord:
        return self._read(self._digests[id])

    def get_whole(self, id: str) -> ProgramRecord:
        """Return the record with its prompts, which are long and needed only for checkpoints."""
        return self._read_file(self._digests[id])

    def _read_blob(self, digest: str) -> ProgramRecord:
        return replace(self._read_file(digest), prompts={})

    def _read_file(self, digest: str) -> ProgramRecord:
        file = ProgramDocument.model_validate_json(self._blobs.read_bytes(digest))
        return file.record(island=None, artifacts=read_artifacts(file.artifacts_json, None))


def keep_artifacts(
    artifacts: Mapping[str, str | bytes], *, max_bytes: int
) -> dict[str, str | bytes]:
    """Return the artifacts that fit, in their order. A further artifact lists those left out."""
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
    """Return True if an artifact is larger than `max_bytes`."""
    return any(_num_bytes(value) > max_bytes for value in artifacts.values())


def _num_bytes(value: str | bytes) -> int:
    return len(value.encode(errors="replace")) if isinstance(value, str) else len(value)
