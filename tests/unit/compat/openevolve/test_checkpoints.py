"""Checkpoints: OpenEvolve's own database reads ours, and we read its."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rookery.compat.openevolve import fill_best, fill_checkpoint, list_checkpoints, read_checkpoint
from rookery.errors import RunError
from rookery.loops.evolve.outputs import FeatureRange, ProgramCheckpoint, WriteOptions
from rookery.loops.evolve.program import ProgramRecord, join_files

OpenEvolve = Callable[[str, Any], Any]
OPTIONS = WriteOptions(saved_at=1000.0, max_inline_bytes=100)

PROGRAMS = (
    ProgramRecord(
        id="a1",
        code="x = 1\r\n",
        timestamp=5.5,
        metrics={"combined_score": 0.25, "note": "ok", "flag": True},
        island=0,
        artifacts={"stderr": "é", "raw": b"\xff\0", "big": "b" * 200, "blob": b"\xfe" * 200},
        embedding=(0.5, 0.25),
    ),
    ProgramRecord(
        id="b2",
        code="x = 2",
        language="python",
        parent_id="a1",
        generation=1,
        iteration=7,
        timestamp=6.5,
        metrics={"combined_score": 0.75, "speed": math.inf},
        island=1,
        changes="Change 1: 'x = 1' to 'x = 2'",
        changes_description="1. two",
        parent_metrics={"combined_score": 0.25},
        metadata={"token_usage": {"total_tokens": 9}, "migrant": True},
        prompts={"diff_user": {"system": "s", "user": "u", "responses": ["r"]}},
    ),
)
CHECKPOINT = ProgramCheckpoint(
    programs=PROGRAMS,
    islands=(("a1",), ("b2",), ()),
    grids=({"0-1": "a1"}, {"3-4": "b2"}, {}),
    archive=("b2",),
    best_id="b2",
    island_best_ids=("a1", "b2", None),
    iteration=7,
    current_island=1,
    island_generations=(1, 2, 0),
    last_migration_generation=0,
    feature_ranges={"complexity": FeatureRange(min=5.0, max=9.0, values=(5.0, 9.0))},
)


def _write(output: Path, checkpoint: ProgramCheckpoint = CHECKPOINT) -> Path:
    folder = output / "checkpoints" / f"checkpoint_{checkpoint.iteration}"
    folder.mkdir(parents=True)
    fill_checkpoint(folder, checkpoint, place=folder, options=OPTIONS)
    return folder


def test_a_checkpoint_can_be_moved(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "checkpoint_7"
    shutil.copytree(_write(tmp_path), moved)
    shutil.rmtree(tmp_path / "checkpoints")
    assert read_checkpoint(moved) == CHECKPOINT


def test_openevolve_loads_ours_and_we_read_what_it_saves(
    openevolve: OpenEvolve, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "ours")
    theirs = openevolve(
        """
from openevolve.config import DatabaseConfig
from openevolve.database import ProgramDatabase
database = ProgramDatabase(DatabaseConfig(num_islands=3))
database.load(DATA["from"])
parent, inspirations = database.sample_from_island(1)
database.save(DATA["to"], 9)
answer({
    "ids": sorted(database.programs),
    "islands": [sorted(island) for island in database.islands],
    "grids": database.island_feature_maps,
    "archive": sorted(database.archive),
    "best": database.get_best_program().id,
    "last": database.last_iteration,
    "stats": database.feature_stats,
    "generations": database.island_generations,
    "artifacts": {k: v for k, v in database.get_artifacts("a1").items() if isinstance(v, str)},
    "parent": parent.id,
    "prompts": database.programs["b2"].prompts,
})
""",
        {"from": str(folder), "to": str(tmp_path / "theirs" / "checkpoints" / "checkpoint_9")},
    )
    assert theirs["ids"] == ["a1", "b2"] and theirs["islands"] == [["a1"], ["b2"], []]
    assert theirs["grids"] == list(CHECKPOINT.grids) and theirs["archive"] == ["b2"]
    assert (theirs["best"], theirs["last"], theirs["parent"]) == ("b2", 7, "b2")
    assert theirs["generations"] == [1, 2, 0]
    assert theirs["stats"] == {"complexity": {"min": 5.0, "max": 9.0, "values": [5.0, 9.0]}}
    assert theirs["artifacts"] == {"stderr": "é", "big": "b" * 200}
    assert theirs["prompts"] == PROGRAMS[1].prompts
    back = read_checkpoint(tmp_path / "theirs" / "checkpoints" / "checkpoint_9")
    # The large artifacts stay in our folder, which is not part of its output.
    first, second = sorted(back.programs, key=lambda program: program.id)
    assert replace(first, artifacts={}) == replace(PROGRAMS[0], artifacts={})
    assert second == PROGRAMS[1]
    assert replace(back, programs=()) == replace(CHECKPOINT, programs=(), iteration=9)


def test_a_long_run_of_openevolve_is_read_whole(openevolve: OpenEvolve, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "checkpoint_300"
    theirs = openevolve(
        """
import random
from openevolve.config import DatabaseConfig
from openevolve.database import Program, ProgramDatabase
rng = random.Random(1)
config = DatabaseConfig(population_size=40, archive_size=10, num_islands=3, migration_interval=5)
database = ProgramDatabase(config)
for i in range(300):
    parent = database.sample_from_island(i % 3)[0].id if i > 20 else None
    program = Program(id=f"p{i}", code="x" * rng.randrange(500), parent_id=parent,
                      metrics={"combined_score": rng.random()}, iteration_found=i)
    database.add(program, iteration=i, target_island=i % 3)
    database.store_artifacts(program.id, {"out": str(i)})
    database.increment_island_generation(i % 3)
    if database.should_migrate():
        database.migrate_programs()
database.save(DATA, 300)
answer({
    "codes": {p.id: p.code for p in database.programs.values()},
    "islands": [sorted(island) for island in database.islands],
    "grids": database.island_feature_maps, "archive": sorted(database.archive),
    "best": database.best_program_id, "stats": {k: [v["min"], v["max"]] for k, v in
                                                database.feature_stats.items()},
})
""",
        str(folder),
    )
    ours = read_checkpoint(folder)
    assert {program.id: program.code for program in ours.programs} == theirs["codes"]
    assert [sorted(island) for island in ours.islands] == theirs["islands"]
    assert [dict(grid) for grid in ours.grids] == theirs["grids"]
    assert sorted(ours.archive) == theirs["archive"]
    assert ours.best_id == theirs["best"] and ours.iteration == 300
    ranges = {name: [seen.min, seen.max] for name, seen in ours.feature_ranges.items()}
    assert ranges == theirs["stats"]
    original = [p for p in ours.programs if p.artifacts]
    assert original and all(p.artifacts["out"] == str(p.iteration) for p in original)


def test_best_is_the_program_and_what_is_known_of_it(tmp_path: Path) -> None:
    fill_best(tmp_path, PROGRAMS[1], options=replace(OPTIONS, suffix=".rs"))
    assert (tmp_path / "best_program.rs").read_text() == "x = 2"
    info = json.loads((tmp_path / "best_program_info.json").read_text())
    assert set(info) == {
        "id",
        "generation",
        "iteration",
        "timestamp",
        "parent_id",
        "metrics",
        "language",
        "saved_at",
    }
    assert (info["id"], info["iteration"], info["parent_id"]) == ("b2", 7, "a1")


def test_the_best_folder_of_a_folder_has_its_files(tmp_path: Path) -> None:
    code = join_files({"a.py": "x", "lib/b.py": "y"})
    fill_best(tmp_path, ProgramRecord(id="p", code=code), options=OPTIONS)
    assert (tmp_path / "best_program" / "lib" / "b.py").read_text() == "y"


def test_prompts_are_kept_only_if_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_7"
    folder.mkdir()
    options = replace(OPTIONS, with_prompts=False)
    fill_checkpoint(folder, CHECKPOINT, place=folder, options=options)
    assert all(not program.prompts for program in read_checkpoint(folder).programs)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "metadata.json").unlink(), "is incomplete: it has no metadata.json"),
        (lambda f: _truncate(f / "metadata.json"), "metadata.json cannot be read"),
        (lambda f: _truncate(f / "programs" / "b2.json"), "b2.json cannot be read"),
        (lambda f: (f / "programs" / "b2.json").unlink(), r"1 programs of its islands \(b2\)"),
        (lambda f: shutil.rmtree(f / "programs"), "is not a checkpoint"),
        (
            lambda f: _edit(f / "metadata.json", islands=3),
            "metadata.json is no part of a checkpoint",
        ),
        (lambda f: _edit(f / "programs" / "b2.json", id="../../evil"), "b2.json is no part of a"),
        (lambda f: _edit(f / "programs" / "b2.json", artifacts_json="{"), "artifacts cannot be"),
    ],
)
def test_torn_and_foreign_folders_get_a_sentence(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    earlier = _write(tmp_path, replace(CHECKPOINT, iteration=3))
    folder = _write(tmp_path)
    damage(folder)
    with pytest.raises(RunError, match=words) as caught:
        read_checkpoint(folder)
    assert f"Use {earlier}." in str(caught.value)


def test_an_output_folder_names_its_checkpoints(tmp_path: Path) -> None:
    folders = [_write(tmp_path, replace(CHECKPOINT, iteration=i)) for i in (100, 20)]
    assert list_checkpoints(tmp_path) == folders[::-1]
    with pytest.raises(RunError, match=r"is not a checkpoint.*checkpoint_20 or .*checkpoint_100"):
        read_checkpoint(tmp_path)


def test_a_foreign_checkpoint_brings_no_other_files(tmp_path: Path) -> None:
    secret = tmp_path / "private" / "a1"
    secret.mkdir(parents=True)
    (secret / "key").write_text("secret")
    folder = _write(tmp_path / "output")
    shutil.rmtree(folder / "artifacts")
    _edit(folder / "programs" / "a1.json", artifact_dir=str(secret))
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "a1").symlink_to(secret)
    assert "key" not in read_checkpoint(folder).programs[0].artifacts


def test_dangling_references_are_left_out(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    _edit(
        folder / "metadata.json",
        archive=["b2", "gone"],
        best_program_id="gone",
        island_best_programs=["gone"],
        island_feature_maps=[{"0-1": "a1", "1-1": "gone"}],
        island_generations=[1],
        current_island=9,
    )
    read = read_checkpoint(folder)
    assert read.archive == ("b2",) and read.best is None and read.current_island == 0
    assert read.grids == ({"0-1": "a1"}, {}, {}) and read.island_best_ids == (None, None, None)
    assert read.island_generations == (0, 0, 0)
