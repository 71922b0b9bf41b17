"""Folders are replaced whole: never absent, never half, also where nothing can be exchanged."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rookery.errors import RunError
from rookery.runs import Run, disk


def make(root: Path) -> Run:
    return Run.create(root, kind="evolve", name="poet", config={})


def fill(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        for name in ("a", "sub/b"):
            (folder / name).write_text(text)

    return write


def read(folder: Path) -> str:
    texts = {(folder / name).read_text() for name in ("a", "sub/b")}
    assert len(texts) == 1
    return texts.pop()


def test_a_folder_is_never_absent(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        best = run.write_folder("best", fill("0"))
        probe, other = tmp_path / "probe", tmp_path / "other"
        probe.mkdir()
        other.mkdir()
        if not disk.exchange(probe, other):
            pytest.skip("the file system cannot exchange folders")
        has_ended = threading.Event()
        missing: list[int] = []
        looks = 0

        def look() -> None:
            nonlocal looks
            while not has_ended.is_set():
                looks += 1
                if not best.exists():
                    missing.append(looks)

        thread = threading.Thread(target=look)
        thread.start()
        for i in range(1, 60):
            run.write_folder("best", fill(str(i)))
        has_ended.set()
        thread.join()
        assert looks > 100 and not missing
        assert read(best) == "59"
        assert not list((run.path / ".tmp").iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("ways")
def test_folders_nest(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        for step in (10, 20, 10):
            path = run.write_folder(f"checkpoints/checkpoint_{step}", fill(str(step)))
            assert path == run.path / "checkpoints" / f"checkpoint_{step}"
            assert read(path) == str(step)
        for name in ("checkpoints/../x", "a//b", "/a", "blobs/x", "a/.b", "a/"):
            with pytest.raises(RunError, match="folder name"):
                run.write_folder(name, fill("x"))
        names = sorted(p.name for p in (run.path / "checkpoints").iterdir())
        assert names == ["checkpoint_10", "checkpoint_20"]


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_kill_between_two_renames_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    class Killed(BaseException):
        pass

    done, rename = 0, os.rename

    def counted(source: Path, target: Path) -> None:
        nonlocal done
        if done == num_renames:
            raise Killed
        done += 1
        rename(source, target)

    run = make(tmp_path)
    run.write_folder("logs/best", fill("old"))
    monkeypatch.setattr(disk, "exchange", lambda *_: False)
    monkeypatch.setattr(disk, "sync_folder", lambda path: None)
    monkeypatch.setattr(os, "rename", counted)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    try:
        run.write_folder("logs/best", fill("new"))
    except Killed:
        assert num_renames < 2
    monkeypatch.undo()
    run.close()
    with Run.open(run.path) as run:
        assert read(run.path / "logs/best") == ("new" if num_renames == 2 else "old")
        assert not list((run.path / ".old").glob("*"))


def test_what_the_system_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError) as failed:
        disk.exchange(tmp_path / "none", tmp_path)
    assert failed.value.errno == errno.ENOENT
