"""The language of a program, by its file name, else by its text; and code in one spelling.

detect_language("x = 1", suffix=".py")      "python"
detect_language("#include <vector>\\n")      "cpp"
"""

import re

__all__ = ["SUFFIXES", "UNKNOWN", "detect_language", "file_suffix", "normalise", "suffix_of"]

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
