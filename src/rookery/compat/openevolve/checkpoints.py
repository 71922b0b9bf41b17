"""Checkpoints in OpenEvolve's format: folders with the population at one iteration."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rookery.errors import RunError
from rookery.loops.evolve.outputs import FeatureRange, ProgramCheckpoint, WriteOptions
from rookery.loops.evolve.program import (
    ProgramDocument,
    ProgramRecord,
    program_document,
    read_artifacts,
)

__all__ = ["fill_best", "fill_checkpoint", "list_checkpoints", "read_checkpoint"]

# Reads a checkpoint folder of OpenEvolve or our own to start from.
#
# An incomplete folder, or one that is no checkpoint, is a RunError that names another to use.


_NUMBERED = re.compile(r"checkpoint_(\d+)")
Document = TypeVar("Document", bound=BaseModel)


class _Range(BaseModel):
    min: float
    max: float
    values: tuple[float, ...] = ()


class _Metadata(BaseModel):
    model_config = ConfigDict(extra="ignore")

    island_feature_maps: list[dict[str, str]] = []
    islands: list[list[str]]
    archive: list[str] = []
    best_program_id: str | None = None
    island_best_programs: list[str | None] = []
    last_iteration: int = 0
    current_island: int = 0
    island_generations: list[int] = []
    last_migration_generation: int = 0
    feature_stats: dict[str, _Range] = {}


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the `checkpoint_N` folders in a folder or in its `checkpoints`, by number."""
    places = [*folder.glob("checkpoint_*"), *folder.glob("checkpoints/checkpoint_*")]
    numbered = [(match, path) for path in places if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, key=lambda pair: int(pair[0][1]))]


def read_checkpoint(folder: Path) -> ProgramCheckpoint:
    """Read the population of a checkpoint, without references to programs that it lacks."""
    if not (folder / "programs").is_dir():
        raise RunError(f"{folder} is not a checkpoint: it has no folder `programs`.{_hint(folder)}")
    metadata = _parse(_Metadata, folder / "metadata.json", folder)
    island_of = {id: i for i, island in enumerate(metadata.islands) for id in island}
    paths = sorted((folder / "programs").glob("*.json"))
    programs = {p.id: p for p in (_read_program(path, folder, island_of) for path in paths)}
    lost = sorted(island_of.keys() - programs.keys())
    if lost or not programs:
        what = f"{len(lost)} programs of its islands ({lost[0]})" if lost else "all programs"
        raise RunError(f"{folder} is incomplete: {what} are missing.{_hint(folder)}")
    return _checkpoint(metadata, programs)


def _checkpoint(metadata: _Metadata, programs: dict[str, ProgramRecord]) -> ProgramCheckpoint:
    """Build the checkpoint; cut or fill lists over islands to their number, as OpenEvolve does."""
    num_islands = len(metadata.islands)
    grids: list[dict[str, str]] = [
        {cell: id for cell, id in grid.items() if id in programs}
        for grid in metadata.island_feature_maps
    ]
    bests = [id if id in programs else None for id in metadata.island_best_programs]
    is_complete = len(metadata.island_generations) == num_islands
    best_id = metadata.best_program_id
    return ProgramCheckpoint(
        programs=tuple(programs.values()),
        islands=tuple(tuple(island) for island in metadata.islands),
        grids=tuple([*grids, *({} for _ in range(num_islands))][:num_islands]),
        archive=tuple(id for id in metadata.archive if id in programs),
        best_id=best_id if best_id in programs else None,
        island_best_ids=tuple([*bests, *[None] * num_islands][:num_islands]),
        iteration=metadata.last_iteration,
        current_island=metadata.current_island if metadata.current_island < num_islands else 0,
        island_generations=tuple(metadata.island_generations if is_complete else [0] * num_islands),
        last_migration_generation=metadata.last_migration_generation,
        feature_ranges={
            name: FeatureRange(min=seen.min, max=seen.max, values=seen.values)
            for name, seen in metadata.feature_stats.items()
        },
    )


def _read_program(path: Path, folder: Path, island_of: dict[str, int]) -> ProgramRecord:
    file = _parse(ProgramDocument, path, folder)
    place = _artifact_folder(file, folder)
    try:
        artifacts = read_artifacts(file.artifacts_json, place)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: its artifacts cannot be read: {error}.{_hint(folder)}") from error
    return file.record(island=island_of.get(file.id), artifacts=artifacts)


def _artifact_folder(file: ProgramDocument, folder: Path) -> Path | None:
    """Return the folder of large artifacts, ignoring the path that the file names. A foreign
    checkpoint must not bring other files of this machine into a prompt."""
    if file.artifact_dir is None:
        return None
    output = folder.resolve().parent.parent
    places = (folder / "artifacts", output / "artifacts", Path("artifacts"))
    candidates = (place / file.id for place in places)
    return next((path for path in candidates if path.is_dir() and not path.is_symlink()), None)


def _parse(model: type[Document], path: Path, folder: Path) -> Document:
    try:
        return model.model_validate(_load(path))
    except FileNotFoundError:
        raise RunError(f"{folder} is incomplete: it has no {path.name}.{_hint(folder)}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise RunError(
            f"{path} is no part of a checkpoint: {where}: {first['msg']}.{_hint(folder)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}.{_hint(folder)}") from error


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _hint(folder: Path) -> str:
    others = (*list_checkpoints(folder), *list_checkpoints(folder.parent))
    names = [str(path) for path in others if path.resolve() != folder.resolve()]
    return f" Use {' or '.join(names[-2:])}." if names else ""


# Writes `checkpoint_N/` and `best/` so that OpenEvolve's own `load` reads them.
#
#     run.write_folder("best", lambda folder: fill_best(folder, program, options=options))
#
# A function fills a new, empty folder; the caller makes it appear whole or not at all.


def fill_checkpoint(
    folder: Path,
    checkpoint: ProgramCheckpoint,
    *,
    place: Path,
    options: WriteOptions,
    files: Mapping[str, Path] | None = None,
) -> None:
    """Write all files of a checkpoint. `place` is the folder's final path.

    `files` maps program ids to documents that are copied unchanged, so that a large population is
    neither parsed nor held in memory.
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
    """Write `best_program.<suffix>` (a folder's files in `best_program/`) and its info file."""
    _write_code(folder, program, options)
    info = {**_info(program, options), "parent_id": program.parent_id}
    _write_json(folder / "best_program_info.json", info, indent=2)


def _link_or_copy(file: Path, folder: Path, name: str, *, earlier: Path | None) -> None:
    """Never link to `file` itself, from which the run resumes: people may edit checkpoints."""
    if earlier is not None:
        try:
            os.link(f"{earlier}/{name}", f"{folder}/{name}")
            return
        except OSError:
            pass  # it is new, or this file system has no links
    shutil.copyfile(file, folder / name)


def _metadata(checkpoint: ProgramCheckpoint) -> dict[str, Any]:
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
    small, large = _split_artifacts(program.artifacts, max_bytes=options.max_inline_bytes)
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


def _split_artifacts(
    artifacts: Mapping[str, str | bytes], *, max_bytes: int
) -> tuple[dict[str, str | bytes], dict[str, bytes]]:
    """Split artifacts into small ones for the document, and file name to content of large ones."""
    small: dict[str, str | bytes] = {}
    large: dict[str, bytes] = {}
    for name, value in artifacts.items():
        data = value.encode(errors="replace") if isinstance(value, str) else value
        if len(data) <= max_bytes:
            small[name] = value
        else:
            large[_new_file_name(name, large)] = data
    return small, large


def _new_file_name(name: str, taken: Mapping[str, bytes]) -> str:
    file = "".join(char for char in name if char.isalnum() or char in "._-").lstrip(".")
    file = file[:100] or "artifact"
    while file in taken:
        file += "_"
    return file


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
