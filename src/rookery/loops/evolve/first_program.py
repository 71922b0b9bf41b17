"""The program that an evolution starts from, checked before any model is asked.

first = read_first_program(Path("initial_program.py"), config=config)
first.code, first.language, first.suffix, first.warnings
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rookery.errors import ConfigError
from rookery.loops.evolve.answers import evolve_blocks, find_marker_problem
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.program import read_other_files, read_program, split_files

__all__ = [
    "SUFFIXES",
    "UNKNOWN",
    "FirstProgram",
    "detect_language",
    "file_suffix",
    "normalise",
    "read_first_program",
    "suffix_of",
]

# The language of a program, by its file name, else by its text; and code in one spelling.
#
# detect_language("x = 1", suffix=".py")      "python"
# detect_language("#include <vector>\n")      "cpp"


UNKNOWN = "unknown"

SUFFIXES = {
    ".bash": "bash",
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cu": "cuda",
    ".cxx": "cpp",
    ".go": "go",
    ".h": "c",
    ".hpp": "cpp",
    ".hs": "haskell",
    ".java": "java",
    ".jl": "julia",
    ".js": "javascript",
    ".kt": "kotlin",
    ".lua": "lua",
    ".m": "matlab",
    ".md": "markdown",
    ".metal": "metal",
    ".ml": "ocaml",
    ".mlir": "mlir",
    ".php": "php",
    ".py": "python",
    ".r": "r",
    ".rb": "ruby",
    ".rs": "rust",
    ".scala": "scala",
    ".sh": "bash",
    ".sql": "sql",
    ".swift": "swift",
    ".ts": "typescript",
    ".txt": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
}
"""File suffix (lower case) to the word that stands behind the three backticks."""

SIGNATURES = (
    ("python", r"^(import|from|def|class)\s"),
    ("java", r"^(package|import java|public class)"),
    ("cpp", r"^(#include|int main|void main)"),
    ("javascript", r"^(function|var|let|const|console\.log)"),
    ("rust", r"^(module|fn|let mut|impl)"),
    ("sql", r"^(SELECT|CREATE TABLE|INSERT INTO)"),
)
"""How lines of a language begin; the first that fits wins. The order is OpenEvolve's."""


def detect_language(code: str, *, suffix: str = "") -> str:
    """By suffix where it is known, else by how lines begin, else "unknown"."""
    if suffix.lower() in SUFFIXES:
        return SUFFIXES[suffix.lower()]
    fits = (name for name, regex in SIGNATURES if re.search(regex, code, re.MULTILINE))
    return next(fits, UNKNOWN)


def file_suffix(name: str, *, configured: str = ".py") -> str:
    """The suffix that programs are written with: the config's, unless it is the default `.py`.

    A first program without a suffix counts as `.py`.
    """
    if configured != ".py":
        return configured
    _, dot, end = name.rpartition("/")[2].lstrip(".").rpartition(".")
    return f".{end}" if dot and end else ".py"


def normalise(code: str) -> str:
    """The code without what no reader sees: line ends, trailing blanks, blank lines at the ends.

    Equal text means the same program; different text does not mean different programs.
    """
    lines = [line.rstrip() for line in code.splitlines()]
    return "\n".join(lines).strip("\n")


def suffix_of(language: str) -> str:
    """The usual file suffix of a language; `.py` where none is known."""
    return next((suffix for suffix, name in SUFFIXES.items() if name == language), ".py")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProgram:
    """A program as text, with what decides how its children are written."""

    code: str
    language: str
    suffix: str
    """Of the files that programs are written to; of a folder, its commonest."""
    warnings: tuple[str, ...] = ()
    other_files: Mapping[str, str] = field(default_factory=dict)
    """Of a folder in which only some files have markers: the others, which no model changes."""


def read_first_program(path: Path, *, config: EvolveConfig) -> FirstProgram:
    """Read a file or a folder. An empty program and markers without partner are a ConfigError."""
    code = read_program(path)
    texts = split_files(code) or {path.name: code}
    if not any(text.strip() for text in texts.values()):
        raise ConfigError(f"The program {path} is empty.")
    for name, text in texts.items():
        if problem := find_marker_problem(text):
            raise ConfigError(f"The program's file {name}: {problem}")
    suffixes = Counter(PurePosixPath(name).suffix for name in texts)
    name = f"program{suffixes.most_common(1)[0][0]}"
    suffix = file_suffix(name, configured=config.file_suffix)
    seen_suffix = PurePosixPath(name).suffix
    return FirstProgram(
        code=code,
        language=config.language or detect_language(code, suffix=seen_suffix),
        suffix=suffix,
        warnings=tuple(_warnings(texts, config)),
        other_files=read_other_files(path),
    )


def _warnings(texts: dict[str, str], config: EvolveConfig) -> list[str]:
    warnings = []
    if config.enforce_evolve_blocks and not any(map(evolve_blocks, texts.values())):
        warnings.append("enforce_evolve_blocks changes nothing: the program has no EVOLVE-BLOCK")
    num_chars = sum(map(len, texts.values()))
    if num_chars > config.max_code_length:
        warnings.append(
            f"the program has {num_chars} characters and max_code_length is "
            f"{config.max_code_length}: children as long as it are refused"
        )
    return warnings
