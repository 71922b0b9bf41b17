"""The program that an evolution starts from, checked before any model is asked.

first = read_first_program(Path("initial_program.py"), config=config)
first.code, first.language, first.suffix, first.warnings
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rookery.errors import ConfigError
from rookery.loops.evolve.blocks import evolve_blocks, find_marker_problem
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.language import detect_language, file_suffix
from rookery.loops.evolve.source_files import read_other_files, read_program, split_files

__all__ = ["FirstProgram", "read_first_program"]


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
