"""Programs of several files: a folder as one text, and back.

    --- file: solver/search.py ---
    ...
    --- file: solver/moves.py ---
    ...

The text is what prompts show, what checkpoints keep as `code` and what its length is counted of.
In an answer a line that names a file (`solver/moves.py`) stands before a SEARCH/REPLACE block or a
fenced block and says which file it belongs to.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from rookery.errors import ConfigError

__all__ = [
    "find_file_problem",
    "join_files",
    "named_file",
    "read_other_files",
    "read_program",
    "split_files",
]

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
