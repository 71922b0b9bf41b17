"""`checkpoint_N/` and `best/` as OpenEvolve writes them, so that its own `load` reads them.

    run.write_folder("best", lambda folder: fill_best(folder, program, options=options))

A function fills a folder that is new and empty; whoever calls it makes that whole or absent.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rookery.loops.evolve.checkpoints.checkpoint import Checkpoint
from rookery.loops.evolve.checkpoints.program_file import program_document, split_artifacts
from rookery.loops.evolve.program import ProgramRecord

__all__ = ["WriteOptions", "fill_best", "fill_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a checkpoint is written."""

    suffix: str = ".py"
    """Of the best program's file."""
    other_files: Mapping[str, str] = field(default_factory=dict)
    """Of a folder: what stands unchanged beside the program's files."""
    saved_at: float
    """Now, in seconds since 1970."""
    with_prompts: bool = True
    max_inline_bytes: int = 32 * 1024
    """Larger artifacts get files of their own (`database.artifact_size_threshold`)."""
    earlier: Path | None = None
    """A checkpoint of the same run. Programs that it has get a second name, not a second copy: most
    of a population was in the one before."""


def fill_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    place: Path,
    options: WriteOptions,
    files: Mapping[str, Path] | None = None,
) -> None:
    """All files of a checkpoint. `place` is the path at which the folder will stand.

    `files` has programs by id as documents that are copied as they are: a large population is
    neither read nor held in memory for it.
    """
    files = files or {}
    (folder / "programs").mkdir()
    for id, file in files.items():
        _link_or_copy(file, folder, f"programs/{id}.json", earlier=options.earlier)
    for program in checkpoint.programs:
        if program.id not in files:
            _write_program(folder, program, place=place, options=options)
    if best := checkpoint.best:
        _write_code(folder, best, options)
        info = {**_info(best, options), "current_iteration": checkpoint.iteration}
        _write_json(folder / "best_program_info.json", info, indent=2)
    # OpenEvolve writes this last as well: a folder without it is unfinished.
    _write_json(folder / "metadata.json", _metadata(checkpoint))


def fill_best(folder: Path, program: ProgramRecord, *, options: WriteOptions) -> None:
    """`best_program.<suffix>` (a folder's files in `best_program/`) and what is known of it."""
    _write_code(folder, program, options)
    info = {**_info(program, options), "parent_id": program.parent_id}
    _write_json(folder / "best_program_info.json", info, indent=2)


def _link_or_copy(file: Path, folder: Path, name: str, *, earlier: Path | None) -> None:
    """Never a link to `file` itself, which the run resumes from: people may edit checkpoints."""
    if earlier is not None:
        try:
            os.link(f"{earlier}/{name}", f"{folder}/{name}")
            return
        except OSError:
            pass  # it is new, or this file system has no links
    shutil.copyfile(file, folder / name)


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    ranges = checkpoint.feature_ranges.items()
    return {
        "island_feature_maps": [dict(grid) for grid in checkpoint.grids],
        "islands": [list(island) for island in checkpoint.islands],
        "archive": list(checkpoint.archive),
        "best_program_id": checkpoint.best_id,
        "island_best_programs": list(checkpoint.island_best_ids),
        "last_iteration": checkpoint.iteration,
        "current_island": checkpoint.current_island,
        "island_generations": list(checkpoint.island_generations),
        "last_migration_generation": checkpoint.last_migration_generation,
        "feature_stats": {name: asdict(seen) for name, seen in ranges},
    }


def _write_program(
    folder: Path, program: ProgramRecord, *, place: Path, options: WriteOptions
) -> None:
    small, large = split_artifacts(program.artifacts, max_bytes=options.max_inline_bytes)
    inside = Path("artifacts") / program.id
    if large:
        (folder / inside).mkdir(parents=True)
    for name, data in large.items():
        (folder / inside / name).write_bytes(data)
    artifact_dir = place / inside if large else None
    document = program_document(program, small=small, artifact_dir=artifact_dir)
    if not options.with_prompts:
        document["prompts"] = None
    _write_json(folder / "programs" / f"{program.id}.json", document)


def _write_code(folder: Path, program: ProgramRecord, options: WriteOptions) -> None:
    files = program.files
    if not files:
        (folder / f"best_program{options.suffix}").write_bytes(program.code.encode())
        return
    for name, text in {**options.other_files, **files}.items():
        path = folder / "best_program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def _info(program: ProgramRecord, options: WriteOptions) -> dict[str, Any]:
    return {
        "id": program.id,
        "generation": program.generation,
        "iteration": program.iteration,
        "metrics": dict(program.metrics),
        "language": program.language,
        "timestamp": program.timestamp,
        "saved_at": options.saved_at,
    }


def _write_json(path: Path, document: Mapping[str, Any], *, indent: int | None = None) -> None:
    path.write_text(json.dumps(document, indent=indent), encoding="utf-8")
