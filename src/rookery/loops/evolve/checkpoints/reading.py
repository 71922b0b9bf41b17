"""A checkpoint folder, of OpenEvolve or our own, read to start from.

A folder that was cut off while it was written, or is no checkpoint, is a RunError that names the
one to use instead.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rookery.errors import RunError
from rookery.loops.evolve.checkpoints.checkpoint import Checkpoint, FeatureRange
from rookery.loops.evolve.checkpoints.program_file import ProgramFile, read_artifacts
from rookery.loops.evolve.program import ProgramRecord

__all__ = ["list_checkpoints", "read_checkpoint"]

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
    """The `checkpoint_N` folders in a folder or in its `checkpoints`, by number."""
    places = [*folder.glob("checkpoint_*"), *folder.glob("checkpoints/checkpoint_*")]
    numbered = [(match, path) for path in places if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, key=lambda pair: int(pair[0][1]))]


def read_checkpoint(folder: Path) -> Checkpoint:
    """The population of a checkpoint. References to programs that are not kept are left out."""
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


def _checkpoint(metadata: _Metadata, programs: dict[str, ProgramRecord]) -> Checkpoint:
    """The lists over islands, cut or filled to the number of islands as OpenEvolve does."""
    num_islands = len(metadata.islands)
    grids: list[dict[str, str]] = [
        {cell: id for cell, id in grid.items() if id in programs}
        for grid in metadata.island_feature_maps
    ]
    bests = [id if id in programs else None for id in metadata.island_best_programs]
    is_complete = len(metadata.island_generations) == num_islands
    best_id = metadata.best_program_id
    return Checkpoint(
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
    file = _parse(ProgramFile, path, folder)
    place = _artifact_folder(file, folder)
    try:
        artifacts = read_artifacts(file.artifacts_json, place)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: its artifacts cannot be read: {error}.{_hint(folder)}") from error
    return file.record(island=island_of.get(file.id), artifacts=artifacts)


def _artifact_folder(file: ProgramFile, folder: Path) -> Path | None:
    """Where OpenEvolve and we keep large artifacts, whatever path the file names.

    A checkpoint of somebody else must not bring other files of this machine into a prompt.
    """
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
            f"{path} is not of a checkpoint: {where}: {first['msg']}.{_hint(folder)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}.{_hint(folder)}") from error


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _hint(folder: Path) -> str:
    others = (*list_checkpoints(folder), *list_checkpoints(folder.parent))
    names = [str(path) for path in others if path.resolve() != folder.resolve()]
    return f" Use {' or '.join(names[-2:])}." if names else ""
