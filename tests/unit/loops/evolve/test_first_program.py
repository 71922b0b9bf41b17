"""The first program is checked before any model is asked."""

from pathlib import Path

import pytest

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.first_program import read_first_program

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
