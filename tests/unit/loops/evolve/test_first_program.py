"""The first program is checked before any model is asked."""

from pathlib import Path

import pytest

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import read_first_program
from rookery.loops.evolve.program import (
    find_file_problem,
    named_file,
    read_program,
    split_files,
)

CONFIG = EvolveConfig()


def test_language_and_suffix_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "first.rs"
    path.write_text("x")
    first = read_first_program(path, config=CONFIG)
    assert (first.code, first.language, first.suffix, first.warnings) == ("x", "rust", ".rs", ())
    config = EvolveConfig(language="zig", file_suffix=".zig")
    first = read_first_program(path, config=config)
    assert (first.language, first.suffix) == ("zig", ".zig")


def test_a_folder_has_the_suffix_of_most_files(tmp_path: Path) -> None:
    for name in ("a.cpp", "b.cpp", "notes.md"):
        (tmp_path / name).write_text("x")
    first = read_first_program(tmp_path, config=CONFIG)
    assert (first.language, first.suffix) == ("cpp", ".cpp")
    assert first.code.count("--- file:") == 3


def test_bad_programs_get_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_first_program(path, config=CONFIG)
    path.write_text("x = 1\n# EVOLVE-BLOCK-START\n")
    with pytest.raises(ConfigError, match=r"first.py: line 2 has EVOLVE-BLOCK-START, but no"):
        read_first_program(path, config=CONFIG)


def test_settings_that_do_not_fit_the_program_are_named(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    path.write_text("x = 1\n" * 10)
    config = EvolveConfig(max_code_length=50, enforce_evolve_blocks=True)
    warnings = read_first_program(path, config=config).warnings
    assert len(warnings) == 2
    assert "no EVOLVE-BLOCK" in warnings[0] and "60 characters" in warnings[1]


# Programs that are folders.


def _write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_with_markers_is_its_marked_files(tmp_path: Path) -> None:
    marked = "# EVOLVE-BLOCK-START\n1\n# EVOLVE-BLOCK-END\n"
    _write(tmp_path, {"a.py": "fixed", "lib/b.py": marked})
    assert split_files(read_program(tmp_path)) == {"lib/b.py": marked}


def test_a_folder_without_markers_is_all_its_text(tmp_path: Path) -> None:
    _write(tmp_path, {"a.py": "1\r\n", "b.txt": "2", ".git/c": "3", "__pycache__/d": "4"})
    _write(tmp_path, {"data.bin": b"\0\1"})
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert split_files(read_program(tmp_path)) == {"a.py": "1\r\n", "b.txt": "2"}


def test_programs_that_cannot_be_read_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no program"):
        read_program(tmp_path / "nowhere.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="There is no file"):
        read_program(tmp_path / "empty")
    _write(tmp_path, {"latin.py": "é".encode("latin-1")})
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_program(tmp_path / "latin.py")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a\nb", "./a", " a", "a//b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    assert find_file_problem({name: "x"})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.py", "a.py"),
        ("words\n\n**lib/b.py**\n", "lib/b.py"),
        ("### File: `lib/b.py`:\n```python\n", "lib/b.py"),
        ("--- file: a.py ---", "a.py"),
        ("# ./a.py", "a.py"),
        ("a.py is good\nBut:", None),
        ("I change a.py", None),
        ("", None),
    ],
)
def test_the_line_before_a_block_names_its_file(text: str, name: str | None) -> None:
    assert named_file(text, ["a.py", "lib/b.py"]) == name
