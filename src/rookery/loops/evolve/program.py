"""A program under search, with all that OpenEvolve's files say of one."""

import base64
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rookery.errors import ConfigError

__all__ = [
    "Metrics",
    "ProgramRecord",
    "find_file_problem",
    "find_fitness",
    "is_number",
    "join_files",
    "named_file",
    "pack_vector",
    "read_other_files",
    "read_program",
    "split_files",
    "unpack_vector",
]

# Programs of several files: a folder as one text, and back.
#
#     --- file: solver/search.py ---
#     ...
#     --- file: solver/moves.py ---
#     ...
#
# The text is what prompts show, what checkpoints keep as `code` and what its length is counted of.
# In an answer a line that names a file (`solver/moves.py`) stands before a SEARCH/REPLACE block or
# a fenced block and says which file it belongs to.


_HEADER = re.compile(r"^--- file: (\S.*) ---$", re.MULTILINE)
_MARKER_WORD = "EVOLVE-BLOCK-START"


def join_files(files: Mapping[str, str]) -> str:
    """One text of all files, sorted by name. `split_files` gives the same files back."""
    if problem := find_file_problem(files):
        raise ValueError(problem)
    return "\n".join(f"--- file: {name} ---\n{files[name]}" for name in sorted(files))


def split_files(code: str) -> dict[str, str]:
    """File name to text; an empty dict for a program of one file."""
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
    """Why these files cannot be joined, or may not be written; None if they can."""
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\n" in name:
            return f"The file name {name!r} leads out of the program's folder."
        if name != name.strip() or name.endswith(" ---"):
            return f"The file name {name!r} cannot stand in a header line."
        if found := _HEADER.search(text):
            return f"{name} has the line {found[0]!r}, which separates files: change that line."
    return None if files else "There is no file."


def named_file(text: str, names: Iterable[str]) -> str | None:
    """The file that the last line with words in it names, with or without Markdown around it."""
    lines = [line for line in text.splitlines() if re.search(r"\w", line.strip("`"))]
    lines = [line for line in lines if not re.fullmatch(r"```[\w+#.-]*\s*", line.strip())]
    if not lines:
        return None
    word = re.sub(r"(?i)^\W*(?:file(?:name)?\b\W*)?", "", lines[-1])
    word = word.rstrip(" \t\r`*:)]-")
    return next((name for name in names if word == name or word == f"./{name}"), None)


def read_program(path: Path) -> str:
    """The text of a program file, or of a folder: its files with markers, else all its files."""
    if path.is_file():
        return _read_text(path)
    if not path.is_dir():
        raise ConfigError(f"There is no program {path}: give a file or a folder.")
    texts = dict(_folder_texts(path))
    marked = {name: text for name, text in texts.items() if _MARKER_WORD in text}
    if problem := find_file_problem(marked or texts):
        raise ConfigError(f"The program folder {path}: {problem}")
    return join_files(marked or texts)


def read_other_files(path: Path) -> dict[str, str]:
    """The files of a folder that are no part of the program's text, as others have markers: they
    stay as they are beside it."""
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
"""What an evaluator returned: numbers, and whatever else it chose to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """One program, evaluated.

    ProgramRecord(id="7f3c", code="x = 2", parent_id="12ab", generation=1, iteration=9,
                  metrics={"combined_score": 0.7}, island=2)
    """

    id: str
    code: str
    """The text; of a folder the joined text of its files (`source_files`)."""
    language: str = "python"
    parent_id: str | None = None
    generation: int = 0
    iteration: int = 0
    """The iteration that found it; 0 for a first program."""
    timestamp: float = 0.0
    """When it was found, in seconds since 1970."""
    metrics: Metrics = field(default_factory=dict)
    island: int | None = None
    changes: str = ""
    """What its parent's prompt led to: a summary of the diff."""
    changes_description: str = ""
    """What the model says of all changes so far (`prompt.programs_as_changes_description`)."""
    parent_metrics: Metrics = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of OpenEvolve's `metadata`, such as `migrant` and `token_usage`."""
    artifacts: Mapping[str, str | bytes] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Template name to {system, user, responses}."""
    embedding: tuple[float, ...] | None = None

    @property
    def files(self) -> dict[str, str]:
        """File name to text for a folder; empty for a program of one file."""
        return split_files(self.code)


# One number out of the metrics of an evaluator, chosen as OpenEvolve chooses it.


def find_fitness(metrics: Metrics, *, feature_dimensions: Collection[str] = ()) -> float | None:
    """`combined_score`, else the mean of the numbers that are no feature dimension.

    If every number is a feature dimension, the mean of all. In a mean, flags (True, False) and NaN
    do not count. None where there is no number, or where combined_score is NaN.
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
    """Whether a metric is a number that can be compared: no flag, no text, not NaN."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and not math.isnan(value)  # type: ignore[arg-type]


# A vector as text, exact to 32 bits, so that an event of a run can hold it.
#
#     text = pack_vector((0.25, -1.5))
#     unpack_vector(text)                 # (0.25, -1.5)
#
# Four bytes a number, then base64: 1,536 numbers are 8 KiB, a quarter of what JSON takes.


_DTYPE = np.dtype("<f4")


def pack_vector(vector: Sequence[float]) -> str:
    """The text. ValueError when it has no direction: no numbers, all 0, or not finite."""
    with np.errstate(over="ignore"):
        numbers = np.array(vector, dtype=_DTYPE)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or not numbers.any():
        raise ValueError(
            f"Got a vector of shape {numbers.shape} without a direction: it needs finite numbers "
            "that are not all 0."
        )
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def unpack_vector(text: str) -> tuple[float, ...]:
    """The numbers of a packed vector."""
    return tuple(np.frombuffer(base64.b64decode(text), dtype=_DTYPE).tolist())
