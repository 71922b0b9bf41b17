"""Programs that are folders."""

from pathlib import Path

import pytest

from rookery.errors import ConfigError
from rookery.loops.evolve.program import (
    find_file_problem,
    named_file,
    read_program,
    split_files,
)


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
